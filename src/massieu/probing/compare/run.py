"""`compare`: models or stored results in, all read on one text, a comparison out."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from massieu.errors import InputError
from massieu.interruption import interruptible
from massieu.probing.compare.comparison import Comparison
from massieu.probing.compare.kept import Kept, key_of
from massieu.probing.data.given import Batches, Data, Images, Pairs, Text, given_data
from massieu.probing.model.given import Checkpoint, given_model
from massieu.probing.model.model import load_tokenizer
from massieu.probing.replaced.replacement import Replacement, replacements
from massieu.probing.replaced.rules import Rule
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import BATCH_SIZE, Measurement, measured
from massieu.probing.session.draws import DRAWS
from massieu.probing.session.run import Run
from massieu.probing.session.session import ProbeProgress
from massieu.probing.session.sharing import Sharing

Compared = str | os.PathLike[str] | nn.Module | Checkpoint | ProbeResult


@dataclass(frozen=True, eq=False)
class _Given:
    """One model of the comparison, or a result that is stored."""

    name: str
    model: Any


def compare(
    *models: Compared,
    data: Any = None,
    names: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    statistics: Sequence[str] | str | None = None,
    replace: str | Rule | Replacement | Sequence[str | Rule | Replacement] = (),
    draws: int = DRAWS,
    query_sample: int | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Callable[[ProbeProgress], None] | None = None,
) -> Comparison:
    """Measure the same heads of two or more models on the same windows, and test which heads differ.

    Every model is compared with the first. Differences have paired standard errors, from what each unit of the text (a
    block of consecutive windows) adds to both models; p-values by Student's t; and q-values that control the false
    discovery rate over all heads, apart for each statistic. Models are probed one after the other with one tokenizer.
    Models of one shape share the re-initialised control, which is read once.

    Args:
        models: Each a name, a `massieu.Checkpoint`, a module in memory, a `ProbeResult`, or a folder that one was stored in.
            Revisions of one model are checkpoints of one name. Results on different texts are compared only where they are of
            one model; their errors are then taken as independent, and so are those of results that were stored without sums
            by unit.
        data: For all models, as for `massieu.probe`; batches must be a list, or anything else that can be iterated over
            again. Beside a stored result, its own settings of the text hold where they are not given.
        names: A name for each model; without it, that of the file, folder, revision or class.
        out: A folder in which each model's result is stored as soon as it is there. What is there already, of the same
            weights, text and options, is not probed again.
        statistics, replace, draws, query_sample, batch_size, seed: As for `massieu.probe`, the same for all models.
        progress: Called after every batch.

    Raises:
        InputError: fewer than two models; models of different shapes or tokenizers; two models on different texts; and
            all that `massieu.probe` refuses.

    Example:
        Of two heads, the first one's queries are made three times as long, so that it attends to fewer keys.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> _ = torch.manual_seed(0)
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=99)
        >>> model, other = (BertModel(BertConfig(**small)).eval() for _ in range(2))
        >>> _ = other.load_state_dict(model.state_dict())
        >>> _ = other.encoder.layer[0].attention.self.query.weight.data[:4].mul_(300)
        >>> batches = [{"input_ids": torch.randint(99, (6, 12), generator=torch.Generator().manual_seed(0))}]
        >>> data = massieu.Batches(batches, documents=True)
        >>> found = massieu.compare(model, other, data=data, statistics=["entropy"])
        >>> found.named()["head"].to_list()
        [0]
    """
    asked = Measurement(statistics, replacements(replace), draws, False, query_sample, batch_size, seed)
    given, data = _named([_given(model) for model in models], names), given_data(data)
    if isinstance(data, Text | Batches) and data.continue_for is not None:
        raise InputError("models are compared on one text, and with continue_for each reads what it wrote itself")
    to_read = [each for each in given if not isinstance(each.model, ProbeResult)]
    stored = [each for each in given if isinstance(each.model, ProbeResult)]
    if to_read:
        data = _for_all(data, to_read)
    sharing = Sharing()
    if stored and to_read:
        _know(sharing, stored[0].model, stored[0].name)
        data = _as_stored(stored[0].model, data)
    kept = None if out is None else Kept(Path(out))
    with interruptible():
        results = [
            each.model
            if isinstance(each.model, ProbeResult)
            else _read(each.name, each.model, data, asked, sharing, kept, _telling(progress, each.name, len(to_read)))
            for each in given
        ]
    return Comparison.of(results, [each.name for each in given])


def _read(
    name: str,
    model: Checkpoint | nn.Module,
    data: Data,
    asked: Measurement,
    sharing: Sharing,
    kept: Kept | None,
    progress: Callable[[ProbeProgress], None] | None,
) -> ProbeResult:
    """A model's result: the one that is stored, or a new one.

    Raises:
        KeyboardInterrupt: the run was interrupted; what it read of the text cannot be paired with anything.
    """
    key = None if kept is None else key_of(model, data, asked)
    if kept is not None and key is not None and (found := kept.result(key)) is not None:
        _know(sharing, found, name)
        return found
    result = measured(model, data, asked, Run(progress=progress), sharing)
    if not result.complete:
        raise KeyboardInterrupt
    if kept is not None and key is not None:
        kept.keep(result, name, key)
    return result


def _know(sharing: Sharing, result: ProbeResult, name: str) -> None:
    sharing.know(None if result.units is None else result.units.text, name)


def is_result(model: str | os.PathLike[str]) -> bool:
    """Whether a name stands for a result that is stored, and not for a model."""
    return os.path.isfile(Path(model, "run.json")) and not os.path.isfile(Path(model, "config.json"))


def _given(model: Any) -> _Given:
    """A model of the comparison, with what it is called.

    Raises:
        InputError: it is none.
    """
    if isinstance(model, ProbeResult):
        return _Given(model.run.model.name or "result", model)
    if isinstance(model, nn.Module):
        config: Any = getattr(model, "config", None)
        return _Given(str(getattr(config, "_name_or_path", "") or type(model).__name__), model)
    if isinstance(model, Checkpoint):
        name = model.name if model.adapter is None else model.adapter
        shown = "the default model" if name is None else str(name)
        return _Given(shown if model.revision is None else f"{shown}@{model.revision}", model)
    if not isinstance(model, str | os.PathLike):
        raise InputError(
            "a model to compare must be a name, a module, a massieu.Checkpoint or a ProbeResult, got "
            f"{type(model).__name__}"
        )
    if is_result(model):
        return _Given(str(model), ProbeResult.load(model))
    if os.path.isfile(Path(model, "comparison.json")):
        raise InputError(f"{model} holds a comparison; compare takes models and results of probe")
    return _Given(str(model), given_model(model))


def _named(given: list[_Given], names: Sequence[str] | None) -> list[_Given]:
    """Models with short names, no two the same.

    Raises:
        InputError: fewer than two models; other names than one for each.
    """
    if len(given) < 2:
        raise InputError(f"a comparison needs at least two models or results, got {len(given)}")
    if names is not None:
        if isinstance(names, str) or len(names) != len(given) or len(set(names)) != len(given):
            raise InputError(f"names must be {len(given)} different names, one for each model, got {names!r}")
        return [_Given(str(name), each.model) for name, each in zip(names, given, strict=True)]
    short = [Path(each.name).stem if each.name.endswith(".gguf") else Path(each.name).name for each in given]
    counts = Counter(short)
    # Where the last part of a path is not enough, the whole of it; of one model given twice, its place.
    longer = [each.name if counts[name] > 1 else name for name, each in zip(short, given, strict=True)]
    counts, seen = Counter(longer), Counter[str]()
    found = []
    for name, each in zip(longer, given, strict=True):
        seen[name] += 1
        found.append(_Given(f"{name} ({seen[name]})" if counts[name] > 1 else name, each.model))
    return found


def _for_all(data: Data, to_read: Sequence[_Given]) -> Data:
    """The data, with a tokenizer that is loaded once.

    Raises:
        InputError: they can be read only once, and there are several models.
    """
    if isinstance(data, Batches) and hasattr(data.batches, "__next__"):
        raise InputError(
            "batches are read once for each model; give a list, or an iterable that can be read several times"
        )
    if isinstance(data, Text) and len(to_read) > 1 and isinstance(data.paths, tuple) and "-" in map(str, data.paths):
        raise InputError("standard input can be read once only; put the text into a file to compare models on it")
    if isinstance(data, Images) or not isinstance(data.tokenizer, str | os.PathLike):
        return data
    trusted = any(isinstance(each.model, Checkpoint) and each.model.trust_remote_code for each in to_read)
    return replace(data, tokenizer=load_tokenizer(data.tokenizer, trust_remote_code=trusted))


def _as_stored(result: ProbeResult, data: Data) -> Data:
    """The data with the settings of a stored result where none are given."""
    said = result.run.settings
    if isinstance(data, Text) and said.get("source") is not None:
        columns = {"source": said["source"], "target": said["target"]}
        data = Pairs(data.paths, data.tokenizer, strings=data.strings, window=data.window, limit=data.limit, **columns)
    if isinstance(data, Images):
        return data
    stored: dict[str, Any] = {"window": said.get("max_length")}
    if isinstance(data, Batches):
        stored["documents"] = said.get("packing") is False
    else:
        stored["limit"] = said.get("max_tokens")
    if isinstance(data, Text):
        stored |= {"bos": said.get("bos"), "fill_windows": said.get("packing")}
    defaults = {"documents": False, "fill_windows": True}
    new = {name: value for name, value in stored.items() if getattr(data, name) is defaults.get(name)}
    return replace(data, **{name: value for name, value in new.items() if value is not None})


def _telling(
    progress: Callable[[ProbeProgress], None] | None, name: str, number: int
) -> Callable[[ProbeProgress], None] | None:
    if progress is None or number < 2:
        return progress

    def tell(state: ProbeProgress) -> None:
        progress(ProbeProgress(f"{name}: {state.stage}", state.tokens, state.total_tokens, state.windows))

    return tell
