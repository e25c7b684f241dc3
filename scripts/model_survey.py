"""What massieu reads of every architecture in transformers' registry: ``python -m scripts.model_survey [NAME ...]``.

Each architecture is built small from its configuration with random weights, in a process of its own, so that a crash or an
endless loop is a row. What was read is recomputed here in float64 from queries, keys, values and log-weights, and compared
with the model's own results, by a formula that shares no code with the probe.
"""

import argparse
import copy
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import torch
import transformers
from scripts.small_inputs import small_model
from scripts.small_masks import CAPS, NOT_A_NUMBER, capped, masked_inputs, runs
from scripts.small_models import MODEL_MAPPING_NAMES, TooLong, Unbuilt, architecture, configurations
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import massieu
from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall
from massieu.probing.capture.routes import capturing
from massieu.probing.checks.check import first_look

ROWS = 2  # of every batch
OTHER_HEADS = {"levit": {16}, "bridgetower": {1}, "dots3_note_text": {64}}  # numbers of heads that follow from widths
BUILDING, SECONDS = 90, 400  # of a busy machine; the slowest take 20 s of an idle one to be built
MEMORY = 12 << 30


def recomputed_error(call: AttentionCall) -> float:
    """Largest difference from the model's own result of a call, relative to its largest; NaN where it gives no numbers."""
    scores = torch.einsum("bhld,bhnd->bhln", call.query.double(), _per_query_head(call.key, call)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=torch.float64).triu(1)
    if call.log_weight is not None and call.log_weight.dtype == torch.bool:
        scores = scores.masked_fill(~call.log_weight, -torch.inf)
    elif call.log_weight is not None:
        scores = scores + call.log_weight.double()
    top = scores.amax(-1, keepdim=True)
    if call.sink is not None:
        top = torch.maximum(top, call.sink.double()[None, :, None, None])
    seen = (scores > -torch.inf).any(
        -1
    )  # queries that see no key are left out: what a model gives them is a matter of taste
    weights = (scores - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    if call.sink is not None:
        total = total + (call.sink.double()[None, :, None, None] - top).exp()
    weights = weights / total
    pairs = []
    if call.output.numel():
        ours = torch.einsum("bhln,bhnd->blhd", weights, _per_query_head(call.value, call))
        pairs.append((call.output.double()[seen.transpose(1, 2)], ours[seen.transpose(1, 2)]))
    if call.weights is not None:
        pairs.append((call.weights.double()[seen], weights[seen]))
    if not pairs:
        return float("nan")
    # of a call in which no query sees a key there is nothing to compare
    return max(
        (float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) for a, b in pairs if a.numel()), default=0.0
    )


def _per_query_head(tensor: Tensor, call: AttentionCall) -> Tensor:
    return tensor.double().repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)


def attention_calls(model: nn.Module, inputs: dict[str, Tensor]) -> Counter[str]:
    """How often each innermost module that is called attention ran in a plain forward pass."""
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    inner = [n for n in names if not any(o != n and o.startswith(n + ".") for o in names)]
    ran: Counter[str] = Counter()
    modules = dict(model.named_modules())
    handles = [modules[n].register_forward_hook(lambda *_, name=n: ran.update([name])) for n in inner]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return ran


def kind(model: Any, inputs: dict[str, Tensor]) -> str:
    """What an architecture is given, in a word or two."""
    towers = [
        name
        for name in getattr(model.config, "sub_configs", {})
        if re.match("(text|vision|audio|video|image|speech)", name)
    ]
    given = set(inputs)
    senses = given & {"input_ids", "pixel_values", "input_features", "input_values"}
    if len(towers) > 1 or (len(senses) > 1 and "decoder_input_ids" not in given):
        return "several"
    if given & {"pixel_values", "pixel_values_videos", "grid_thw", "image_grid_thw"}:
        return "images"
    if given & {"input_features", "input_values", "audio_mel"}:
        return "sound"
    if "input_ids" in given:
        return "text, encoder and decoder" if getattr(model.config, "is_encoder_decoder", False) else "text"
    return "other"


def survey(model_type: str) -> dict[str, Any]:
    """One row: what is read of an architecture, and how far it is from the model's own."""
    started = time.perf_counter()
    row: dict[str, Any] = {"architecture": model_type}
    try:
        row["class"] = architecture(model_type).__name__
        with at_most(BUILDING):
            model, inputs = small_model(model_type)
    except (Unbuilt, TooLong, ImportError, AttributeError) as error:
        return row | {"outcome": "not built", "reason": " ".join(str(error).split())[:200]}
    row |= {"kind": kind(model, inputs), "inputs": sorted(inputs)}
    ran = attention_calls(model, inputs)
    errors: list[float] = []
    calls: list[AttentionCall] = []
    sites: dict[str, tuple[str, str]] = {}
    refused: dict[str, str] = {}

    def look(call: AttentionCall) -> None:
        sites[call.site.name] = (call.route, call.grade)
        errors.append(recomputed_error(call))
        calls.append(call)

    try:
        with torch.no_grad(), capturing(model, look) as capture:
            model(**inputs)
        refused = {type(model.get_submodule(name)).__name__: reason for name, reason in sorted(capture.refused.items())}
        doubts = layout_doubts(model, inputs, calls)
        massieu.describe(model, inputs)
    except InputError as error:
        return row | {"outcome": "refused", "reason": str(error), "refused": refused}
    except Exception as error:
        return row | {"outcome": "crashed"} | _crash(error)
    wrong = [error for error in errors if not error <= 1e-4]
    row |= {
        "outcome": "unverified" if wrong or doubts else "read",
        **({"reason": "; ".join(doubts[:3])} if doubts else {}),
        "routes": sorted({route for route, _ in sites.values()}),
        "grades": sorted({grade for _, grade in sites.values()}),
        "sites": len(sites),
        "error": max(errors, key=lambda e: (e != e, e)),
        "ran": sum(ran.values()),
        "unread": sorted(
            {
                type(model.get_submodule(name)).__name__
                for name in ran
                if not any(_related(name, site.partition(" (call")[0]) for site in sites)
            }
            - set(refused)
        ),
        "refused": refused,
        "odd": odd_errors(model, model_type, inputs, sorted(call.site.name for call in calls)),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return row


def _crash(error: Exception) -> dict[str, str]:
    """What an exception said, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "massieu" in frame.filename]
    return {
        "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
        "place": f"{Path(frames[-1].filename).name}:{frames[-1].lineno}; {' '.join(mine[-4:])}",
    }


def odd_errors(
    model: nn.Module, model_type: str, inputs: dict[str, Tensor], sites: list[str]
) -> dict[str, float | str]:
    """Errors of attention in float64 under odd masks, and of a copy with low soft caps under all masks, by name.

    Each is the larger of two: with the model's own choice of attention, and with eager attention. It is a sentence where
    not all of the sites are read. A model that does not run in float64 is measured in float32.
    """
    cases = [("usual mask", model, inputs), *((name, model, given) for name, given in masked_inputs(model, inputs))]
    if capped(model):
        with_caps, same = small_model(model_type, CAPS)
        cases.append(("caps", with_caps, same))
        cases += [(f"caps, {name}", with_caps, given) for name, given in masked_inputs(with_caps, same)]
    return {name: _worst(each, given, sites) for name, each, given in cases}


def _worst(model: nn.Module, inputs: dict[str, Tensor], sites: list[str]) -> float | str:
    """The larger error of the model's own choice of attention and of eager attention, in float64; or why there is none."""
    errors: list[float] = []
    doubled, given = (
        copy.deepcopy(model).double(),
        {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()},
    )
    if hasattr(doubled, "set_experts_implementation"):
        doubled.set_experts_implementation("eager")  # their grouped products know no float64
    with in_float64():
        doubles = runs(doubled, given)
    try:
        with in_float64() if doubles else nullcontext():
            if not doubles:
                doubled, given = copy.deepcopy(model), inputs
            for attention in ("its own", "eager"):
                if attention == "eager":
                    doubled.set_attn_implementation("eager")
                    if not runs(doubled, given):  # some do not run on it, for reasons of their own
                        break
                calls = _calls(doubled, given)
                if sorted(call.site.name for call in calls) != sites:
                    return f"{len(calls)} of {len(sites)} sites are read"
                if any(bool(call.output.isnan().any() | call.query.isnan().any()) for call in calls):
                    return NOT_A_NUMBER
                errors += map(recomputed_error, calls)
    except InputError as error:
        return str(error)
    except Exception as error:
        return "crashed: " + " ".join(_crash(error).values())
    return max(errors, key=lambda error: (error != error, error))


def _calls(model: nn.Module, inputs: dict[str, Tensor]) -> list[AttentionCall]:
    """Every call of attention, of a pass whose self-check holds."""
    calls: list[AttentionCall] = []
    with torch.no_grad(), capturing(model, calls.append):
        model(**inputs)
    first_look(model, inputs)
    return calls


class _Doubled(TorchFunctionMode):
    """What a model asks for in float32 by name, such as its softmax, it gets in float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """All floating-point numbers that are made here are of float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubled():
            yield
    finally:
        torch.set_default_dtype(usual)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Building ends after so many seconds.

    Raises:
        TooLong: it took longer.
    """

    def ring(*_: Any) -> None:
        raise TooLong(f"building took more than {seconds} seconds")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _declared_heads(model: Any) -> set[int]:
    """Every number of heads that the model's configuration speaks of."""
    fields = [(name, value) for config in configurations(model.config) for name, value in vars(config).items()]
    found = set[int]()
    for value in (value for name, value in fields if re.search(r"head(s|s_per_stage)?$", name)):
        found |= {each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, int)}
    return found


def layout_doubts(model: nn.Module, inputs: dict[str, Tensor], calls: list[AttentionCall]) -> list[str]:
    """Sites whose heads are not those of the configuration, or whose items do not change places when the batch's do.

    What is recomputed of one call from itself cannot show that items, heads and tokens are mistaken for one another.
    """
    declared = _declared_heads(model) | OTHER_HEADS.get(model.config.model_type, set())
    said = [
        f"{call.site.name}: {call.query.shape[1]} heads, none of {sorted(declared)}"
        for call in calls
        if call.query.shape[1] not in declared
    ]
    if any(value.shape[0] != ROWS for value in inputs.values()):
        return said
    swapped: list[Tensor] = []
    with torch.no_grad(), capturing(model, lambda call: swapped.append(_items(call))):
        model(**{name: value.flip(0) for name, value in inputs.items()})
    for call, other in zip(calls, swapped, strict=True):
        given = _items(call)
        place = 2 if given.shape[0] == 1 else 0  # some put all items into one sequence
        orders = [(ROWS, -1), (-1, ROWS)] if given.shape[place] % ROWS == 0 else []
        flipped = [_flipped(given, place, order) for order in orders]
        if tuple(given.shape[0:3:2]) == (ROWS, ROWS):
            flipped.append(given.flip(0, 2))  # every item asks with the texts of all items
        if not any(torch.allclose(each, other, rtol=1e-3, atol=1e-3 * float(other.abs().max())) for each in flipped):
            said.append(f"{call.site.name}: its items do not change places with the batch's")
    return said


def _flipped(tensor: Tensor, place: int, order: tuple[int, int]) -> Tensor:
    return tensor.unflatten(place, order).flip(place + order.index(ROWS)).flatten(place, place + 1)


def _items(call: AttentionCall) -> Tensor:
    """What tells the items of a call apart."""
    if call.grade == "full":
        return call.query
    scores = call.log_weight if call.log_weight is not None else call.query
    return scores.masked_fill(scores == -torch.inf, 0.0)


def _related(name: str, other: str) -> bool:
    return name == other or name.startswith(other + ".") or other.startswith(name + ".")


def _work(model_type: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    try:
        pipe.send(survey(model_type))
    except BaseException as error:
        pipe.send({"architecture": model_type, "outcome": "survey failed", "reason": traceback.format_exc()[-1500:]})
        if isinstance(error, KeyboardInterrupt):
            raise


def in_own_process(model_type: str) -> dict[str, Any]:
    """A row, whatever happens to the process that makes it."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=_work, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if not mine.poll(SECONDS):
            return {"architecture": model_type, "outcome": "crashed", "reason": f"no answer in {SECONDS} seconds"}
        return mine.recv()
    except EOFError:
        process.join()
        return {"architecture": model_type, "outcome": "crashed", "reason": f"its process ended ({process.exitcode})"}
    finally:
        process.kill()
        process.join()


def as_json(release: str, rows: list[dict[str, Any]]) -> str:
    """The rows as they are stored, one in a line."""
    lines = ",\n".join(json.dumps({k: v for k, v in row.items() if k != "seconds"}, sort_keys=True) for row in rows)
    return f'{{"transformers": "{release}", "architectures": [\n{lines}\n]}}\n'


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; none is all; the other rows of --out stay as they are")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--out", type=Path, help="file for the rows")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    survey("bert")  # imports what each process would import again
    rows = []
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for row in pool.map(in_own_process, given.names or sorted(MODEL_MAPPING_NAMES)):
            rows.append(row)
            if given.names or row["outcome"] not in ("read", "not built"):
                print(json.dumps(row), flush=True)
    print(Counter(row["outcome"] for row in rows))
    if given.out:
        release = ".".join(transformers.__version__.split(".")[:2])
        kept = (
            json.loads(given.out.read_text(encoding="utf-8"))["architectures"]
            if given.names and given.out.exists()
            else []
        )
        every = {row["architecture"]: row for row in [*kept, *rows]}
        given.out.write_text(as_json(release, [every[name] for name in sorted(every)]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
