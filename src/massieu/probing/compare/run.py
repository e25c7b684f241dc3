"""`compare`: models or stored results in, all read on one text, a comparison out."""

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from massieu.errors import InputError
from massieu.interruption import interruptible
from massieu.probing.compare.comparison import Comparison
from massieu.probing.compare.kept import Kept, key_of
from massieu.probing.model.model import load_tokenizer
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import probe
from massieu.probing.session.session import ProbeProgress
from massieu.probing.session.sharing import Sharing

Model = str | Path | nn.Module | ProbeResult
_OF_THIS_CALL = ("model", "tokenizer_or_batches", "revision", "progress", "sharing", "generate")
_OF_THIS_CALL += ("distributed", "running", "resume", "store_every", "per_token")  # of one probe, not of several
_OPTIONS = tuple(name for name in inspect.signature(probe).parameters if name not in _OF_THIS_CALL)
_OF_THE_TEXT = ("max_length", "max_tokens", "packing", "bos", "source", "target")
"""Options that a stored result says when they are not given."""


@dataclass(frozen=True, eq=False)
class _Given:
    """One model of the comparison, or a result that is stored."""

    name: str
    model: Any
    revision: str | None = None


def compare(
    *models: Model,
    tokenizer_or_batches: Any = None,
    names: Sequence[str] | None = None,
    revisions: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[ProbeProgress], None] | None = None,
    **options: Any,
) -> Comparison:
    """Measure the same heads of two or more models on the same windows, and test which heads differ.

    Every model is compared with the first. Differences have paired standard errors, from what each unit of the text (a
    block of consecutive windows) adds to both models; p-values by Student's t; and q-values that control the false
    discovery rate over all heads, apart for each statistic. Models are probed one after the other with one tokenizer.
    Models of one shape share the re-initialised control, which is read once.

    Args:
        models: Each a folder, GGUF file or hub name, a module in memory, a `ProbeResult`, or a folder that one was stored
            in. Results on different texts are compared only where they are of one model; their errors are then taken as
            independent, and so are those of results that were stored without sums by unit.
        tokenizer_or_batches: For all models, as for `massieu.probe`; batches must be a list, or anything else that can be
            iterated over again.
        names: A name for each model; without it, that of the file, folder or class.
        revisions: Branches, tags or commits of one model on the hub, in place of several models.
        out: A folder in which each model's result is stored as soon as it is there. What is there already, of the same
            weights, text and options, is not probed again.
        progress: Called after every batch.
        options: What else `massieu.probe` takes, the same for all models. Beside a stored result, its own ``max_length``,
            ``max_tokens``, ``packing``, ``bos``, ``source`` and ``target`` hold where they are not given.

    Raises:
        InputError: fewer than two models; models of different shapes or tokenizers; two models on different texts; an
            option that `massieu.probe` does not have; and all that `massieu.probe` refuses.

    Example:
        Of two heads, the first one's queries are made three times as long, so that it attends to fewer keys.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=99)
        >>> model, other = (BertModel(BertConfig(**small)).eval() for _ in range(2))
        >>> _ = other.load_state_dict(model.state_dict())
        >>> _ = other.encoder.layer[0].attention.self.query.weight.data[:4].mul_(300)
        >>> batches = [{"input_ids": torch.randint(99, (6, 12), generator=torch.Generator().manual_seed(0))}]
        >>> found = massieu.compare(model, other, tokenizer_or_batches=batches, statistics=["entropy"], packing=False)
        >>> found.named()["head"].to_list()
        [0]
    """
    unknown = next((name for name in options if name not in _OPTIONS), None)
    if unknown is not None:
        raise InputError(f"compare has no argument {unknown!r}; those of probe that it takes are {', '.join(_OPTIONS)}")
    if isinstance(tokenizer_or_batches, str | Path):
        tokenizer_or_batches = load_tokenizer(
            tokenizer_or_batches, trust_remote_code=options.get("trust_remote_code", False)
        )
    given = _named(_each(models, revisions), names)
    to_read = [each for each in given if not isinstance(each.model, ProbeResult)]
    stored = [each for each in given if isinstance(each.model, ProbeResult)]
    if to_read and tokenizer_or_batches is not None and not callable(tokenizer_or_batches):
        _check_repeatable(tokenizer_or_batches)
    _check_text(options, to_read)
    sharing = Sharing()
    if stored and to_read:
        _know(sharing, stored[0].model, stored[0].name)
        options = _of_the_text(stored[0].model, options)
    kept = None if out is None else Kept(Path(out))
    with interruptible():
        results = [
            each.model
            if isinstance(each.model, ProbeResult)
            else _read(each, tokenizer_or_batches, options, sharing, kept, _telling(progress, each.name, len(to_read)))
            for each in given
        ]
    return Comparison.of(results, [each.name for each in given])


def _read(
    given: _Given,
    tokenizer_or_batches: Any,
    options: dict[str, Any],
    sharing: Sharing,
    kept: Kept | None,
    progress: Callable[[ProbeProgress], None] | None,
) -> ProbeResult:
    """A model's result: the one that is stored, or a new one.

    Raises:
        KeyboardInterrupt: the run was interrupted; what it read of the text cannot be paired with anything.
    """
    key = None if kept is None else key_of(given.model, given.revision, tokenizer_or_batches, options)
    if kept is not None and key is not None and (found := kept.result(key)) is not None:
        _know(sharing, found, given.name)
        return found
    result = probe(
        given.model, tokenizer_or_batches, revision=given.revision, progress=progress, sharing=sharing, **options
    )
    if not result.complete:
        raise KeyboardInterrupt
    if kept is not None and key is not None:
        kept.keep(result, given.name, key)
    return result


def _know(sharing: Sharing, result: ProbeResult, name: str) -> None:
    sharing.know(None if result.units is None else result.units.text, name)


def _each(models: Sequence[Model], revisions: Sequence[str] | None) -> list[_Given]:
    if revisions is not None:
        if isinstance(revisions, str) or not all(isinstance(each, str) for each in revisions):
            raise InputError(f"revisions must be a list of names of revisions, got {revisions!r}")
        if len(models) != 1 or not isinstance(models[0], str):
            raise InputError(f"revisions are of one model on the hub, named once; {len(models)} models were given")
        found = [_Given(each, models[0], each) for each in revisions]
    else:
        found = [_given(model) for model in models]
    if len(found) < 2:
        raise InputError(f"a comparison needs at least two models or results, got {len(found)}")
    return found


def _given(model: Model) -> _Given:
    if isinstance(model, ProbeResult):
        return _Given(model.run.model.name or "result", model)
    if isinstance(model, nn.Module):
        config: Any = getattr(model, "config", None)
        return _Given(str(getattr(config, "_name_or_path", "") or type(model).__name__), model)
    if not isinstance(model, str | Path):
        raise InputError(f"a model to compare must be a name, a module or a ProbeResult, got {type(model).__name__}")
    if os.path.isfile(Path(model, "run.json")) and not os.path.isfile(Path(model, "config.json")):
        return _Given(str(model), ProbeResult.load(model))
    if os.path.isfile(Path(model, "comparison.json")):
        raise InputError(f"{model} holds a comparison; compare takes models and results of probe")
    return _Given(str(model), model)


def _named(given: list[_Given], names: Sequence[str] | None) -> list[_Given]:
    """Models with short names, no two the same."""
    if names is not None:
        if isinstance(names, str) or len(names) != len(given) or len(set(names)) != len(given):
            raise InputError(f"names must be {len(given)} different names, one for each model, got {names!r}")
        return [_Given(str(name), each.model, each.revision) for name, each in zip(names, given, strict=True)]
    short = [Path(each.name).stem if each.name.endswith(".gguf") else Path(each.name).name for each in given]
    counts = Counter(short)
    # Where the last part of a path is not enough, the whole of it; of one model given twice, its place.
    longer = [each.name if counts[name] > 1 else name for name, each in zip(short, given, strict=True)]
    counts, seen = Counter(longer), Counter[str]()
    found = []
    for name, each in zip(longer, given, strict=True):
        seen[name] += 1
        found.append(_Given(f"{name} ({seen[name]})" if counts[name] > 1 else name, each.model, each.revision))
    return found


def _check_repeatable(batches: Any) -> None:
    if hasattr(batches, "__next__"):
        raise InputError(
            "batches are read once for each model; give a list, or an iterable that can be read several times"
        )


def _check_text(options: dict[str, Any], to_read: list[_Given]) -> None:
    text = options.get("text")
    sources = [text] if isinstance(text, str | Path) else list(text or ())
    if "-" in map(str, sources) and len(to_read) > 1:
        raise InputError("standard input can be read once only; put the text into a file to compare models on it")


def _of_the_text(result: ProbeResult, options: dict[str, Any]) -> dict[str, Any]:
    """The options with those of a stored result where they are not given."""
    settings = result.run.settings
    return {name: settings[name] for name in _OF_THE_TEXT if settings.get(name) is not None} | options


def _telling(
    progress: Callable[[ProbeProgress], None] | None, name: str, number: int
) -> Callable[[ProbeProgress], None] | None:
    if progress is None or number < 2:
        return progress

    def tell(state: ProbeProgress) -> None:
        progress(ProbeProgress(f"{name}: {state.stage}", state.tokens, state.total_tokens, state.windows))

    return tell
