"""`compare`: models or stored results, all read on one text, become a comparison."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from massieu.errors import InputError
from massieu.interruption import interruptible
from massieu.probing.compare.comparison import Comparison
from massieu.probing.compare.stored_results import StoredResults, key_of
from massieu.probing.data.given import Batches, Data, Images, Pairs, Text, given_data
from massieu.probing.model.given import Checkpoint, given_model
from massieu.probing.model.model import load_tokenizer
from massieu.probing.model.unwrap import holds_model, module_in
from massieu.probing.replaced.replacement import Replacement, replacements
from massieu.probing.replaced.rules import Rule
from massieu.probing.result.result import ProbeResult
from massieu.probing.run import BATCH_SIZE, Measurement, measured
from massieu.probing.session.draws import DRAWS
from massieu.probing.session.progress import ProbeProgress, Progress, Tell, telling
from massieu.probing.session.run import Run
from massieu.probing.session.sharing import Sharing

Compared = str | os.PathLike[str] | nn.Module | Checkpoint | ProbeResult


@dataclass(frozen=True, eq=False)
class _NamedModel:
    """One model of the comparison, or a stored result in its place, with its name."""

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
    progress: Progress = True,
) -> Comparison:
    """Measure the same heads of two or more models on the same windows, and test which heads differ.

    Every model is compared with the first. Differences have paired standard errors, from the contribution of each unit of the
    text (a block of consecutive windows) to both models. P-values are by Student's t; q-values control the false discovery
    rate over all heads and statistics of a model. Models are probed one after the other with one tokenizer. Models of one
    shape share the re-initialised control, which is read once.

    Args:
        models: Each a name, a `massieu.Checkpoint`, a module in memory, a `ProbeResult`, or a folder in which one was stored.
            Revisions of one model are checkpoints of one name. Results on different texts are compared only if they are of
            one model. Their errors are then taken as independent; so are those of results that were stored without sums by
            unit.
        data: For all models, as for `massieu.probe`; batches must be a list, or another iterable that can be read again.
            With a stored result, settings of the text that are not given are those of the result.
        names: A name for each model; by default, that of the file, folder, revision or class.
        out: A folder in which each model's result is stored as soon as it is measured. A result that is there already, of
            the same weights, text and options, is not measured again.
        statistics, replace, draws, query_sample, batch_size, seed: As for `massieu.probe`, the same for all models.
        progress: As for `massieu.Run`.

    Raises:
        InputError: fewer than two models; models of different shapes or tokenizers; two models on different texts; and
            all errors of `massieu.probe`.

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
        >>> comparison = massieu.compare(model, other, data=data, statistics=["entropy"])
        >>> comparison.named()["head"].to_list()
        [0]
    """
    run = Run(progress=progress)
    measurement = Measurement(statistics, replacements(replace), draws, False, query_sample, batch_size, seed)
    named_models = _with_short_names([_named_model(model) for model in models], names)
    data = given_data(data)
    if isinstance(data, Text | Batches) and data.continue_for is not None:
        raise InputError("models are compared on one text, and with continue_for each reads what it wrote itself")
    to_read = [each for each in named_models if not isinstance(each.model, ProbeResult)]
    stored = [each for each in named_models if isinstance(each.model, ProbeResult)]
    if to_read:
        data = _for_all(data, to_read)
    sharing = Sharing()
    if stored and to_read:
        _share_text_of(stored[0].model, stored[0].name, sharing)
        data = _with_stored_settings(stored[0].model, data)
    stored_results = None if out is None else StoredResults(Path(out))
    results: list[ProbeResult] = []
    with interruptible(), telling(run.progress) as tell:
        for each in named_models:
            if isinstance(each.model, ProbeResult):
                results.append(each.model)
            else:
                model_progress = _progress_of_model(tell, each.name, len(to_read))
                result = _read(each.name, each.model, data, measurement, sharing, stored_results, model_progress)
                results.append(result)
    return Comparison.of(results, [each.name for each in named_models])


def _read(
    name: str,
    model: Checkpoint | nn.Module,
    data: Data,
    measurement: Measurement,
    sharing: Sharing,
    stored_results: StoredResults | None,
    progress: Tell,
) -> ProbeResult:
    """A model's result: the stored one, or a new one.

    Raises:
        KeyboardInterrupt: the run was interrupted; a part of the text cannot be paired with the whole of it.
    """
    if stored_results is None:
        return _measured(model, data, measurement, sharing, progress)
    key = key_of(model, data, measurement)
    stored = stored_results.load(key)
    if stored is not None:
        _share_text_of(stored, name, sharing)
        return stored
    result = _measured(model, data, measurement, sharing, progress)
    stored_results.save(result, name, key)
    return result


def _measured(
    model: Checkpoint | nn.Module,
    data: Data,
    measurement: Measurement,
    sharing: Sharing,
    progress: Tell,
) -> ProbeResult:
    """A new and complete result.

    Raises:
        KeyboardInterrupt: as `_read`.
    """
    result = measured(model, data, measurement, Run(progress=progress), sharing)
    if not result.complete:
        raise KeyboardInterrupt
    return result


def _share_text_of(result: ProbeResult, name: str, sharing: Sharing) -> None:
    """From here on, every model must read the text of this result."""
    sharing.expect_text(None if result.units is None else result.units.text, name)


def is_result(model: str | os.PathLike[str]) -> bool:
    """Whether a name stands for a stored result, and not for a model."""
    return os.path.isfile(Path(model, "run.json")) and not os.path.isfile(Path(model, "config.json"))


def _named_model(model: Any) -> _NamedModel:
    """A model of the comparison, with its full name.

    Raises:
        InputError: it is not one.
    """
    if isinstance(model, ProbeResult):
        return _NamedModel(model.run.model.name or "result", model)
    if isinstance(model, nn.Module) or holds_model(model):
        config: Any = getattr(module_in(model), "config", None)
        return _NamedModel(str(getattr(config, "_name_or_path", "") or type(model).__name__), model)
    if isinstance(model, Checkpoint):
        name = model.name if model.adapter is None else model.adapter
        shown = "the default model" if name is None else str(name)
        return _NamedModel(shown if model.revision is None else f"{shown}@{model.revision}", model)
    if not isinstance(model, str | os.PathLike):
        raise InputError(
            "a model to compare must be a name, a module, a massieu.Checkpoint or a ProbeResult, got "
            f"{type(model).__name__}"
        )
    if is_result(model):
        return _NamedModel(str(model), ProbeResult.load(model))
    if os.path.isfile(Path(model, "comparison.json")):
        raise InputError(f"{model} holds a comparison; compare takes models and results of probe")
    return _NamedModel(str(model), given_model(model))


def _with_short_names(models: list[_NamedModel], names: Sequence[str] | None) -> list[_NamedModel]:
    """The models with short names, no two the same.

    Args:
        names: the user's; None to shorten the full names.

    Raises:
        InputError: fewer than two models; names that are not one for each model, or not different.
    """
    number = len(models)
    if number < 2:
        raise InputError(f"a comparison needs at least two models or results, got {number}")
    if names is not None:
        if isinstance(names, str) or len(names) != number or len(set(names)) != number:
            raise InputError(f"names must be {number} different names, one for each model, got {names!r}")
        return [_NamedModel(str(name), each.model) for name, each in zip(names, models, strict=True)]
    last_parts = [Path(each.name).stem if each.name.endswith(".gguf") else Path(each.name).name for each in models]
    # The last part of a path; if several models share it, the whole path; if one model is given twice, a number.
    same_part = Counter(last_parts)
    unnumbered = [each.name if same_part[part] > 1 else part for part, each in zip(last_parts, models, strict=True)]
    same_name = Counter(unnumbered)
    used = Counter[str]()
    renamed = []
    for name, each in zip(unnumbered, models, strict=True):
        used[name] += 1
        renamed.append(_NamedModel(f"{name} ({used[name]})" if same_name[name] > 1 else name, each.model))
    return renamed


def _for_all(data: Data, to_read: Sequence[_NamedModel]) -> Data:
    """The data, with a tokenizer that is loaded once.

    Raises:
        InputError: the data can be read only once, and there are several models.
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


def _with_stored_settings(result: ProbeResult, data: Data) -> Data:
    """The data, with the settings of a stored result in place of those that were left at their defaults."""
    settings = result.run.settings
    if isinstance(data, Text) and settings.get("source") is not None:
        data = Pairs(
            data.paths,
            data.tokenizer,
            strings=data.strings,
            window=data.window,
            limit=data.limit,
            source=settings["source"],
            target=settings["target"],
        )
    if isinstance(data, Images):
        return data
    stored: dict[str, Any] = {"window": settings.get("max_length")}
    if isinstance(data, Batches):
        stored["documents"] = settings.get("packing") is False
    else:
        stored["limit"] = settings.get("max_tokens")
    if isinstance(data, Text):
        stored |= {"bos": settings.get("bos"), "fill_windows": settings.get("packing")}
    defaults = {"documents": False, "fill_windows": True}  # of all others None
    changes = {
        name: value for name, value in stored.items() if getattr(data, name) is defaults.get(name) and value is not None
    }
    return replace(data, **changes)


def _progress_of_model(tell: Tell, name: str, models: int) -> Tell:
    """A progress function that names the model, if several are read."""
    if models < 2:
        return tell

    def report(state: ProbeProgress) -> None:
        tell(ProbeProgress(f"{name}: {state.stage}", state.tokens, state.total_tokens, state.windows))

    return report
