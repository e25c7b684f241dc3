"""The options of a command as the objects that the probe takes: models, data, statistics, replacements."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from massieu.errors import InputError

if TYPE_CHECKING:
    from massieu.probing.data.given import Data
    from massieu.probing.replaced.replacement import Replacement
    from massieu.probing.statistics.catalogue import Named


def data_of(
    text: Sequence[str] | None,
    tokenizer: str | None = None,
    *,
    images: Sequence[str] | None = None,
    column: str | None = None,
    source: str | None = None,
    target: str | None = None,
    max_length: int | None = None,
    max_tokens: int | None = None,
    no_packing: bool = False,
    bos: bool | None = None,
    generate: int | None = None,
) -> "Data":
    """Images if any are named, pairs if columns of them are named, else text.

    Raises:
        InputError: options exclude each other, or the objects refuse them.
    """
    from massieu.probing.data.given import Images, Pairs, Text

    window_options = {"--bos": bos, "--generate": generate, "--no-packing": no_packing or None, "--column": column}
    if images is not None:
        text_options = {"--text": text, "--source": source, "--target": target, "--max-length": max_length}
        _refuse("images are read in place of text", {**text_options, "--max-tokens": max_tokens, **window_options})
        return Images(images, tokenizer)
    if source is not None or target is not None:
        _refuse("source and target are columns of pairs", window_options)
        if text is None:
            raise InputError(
                "source and target name columns of a text, and no text was given; name a table with --text"
            )
        return Pairs(text, tokenizer, source=source, target=target, window=max_length, limit=max_tokens)
    return Text(
        text,
        tokenizer,
        window=max_length,
        limit=max_tokens,
        column=column,
        fill_windows=not no_packing,
        bos=bos,
        continue_for=generate,
    )


def check_prompt(prompt: str | None, others: dict[str, Any]) -> None:
    """Raises:
    InputError: there is no prompt, it is the name of a file, or others are given that are about text.
    """
    if prompt is None:
        raise InputError("--chat is about a prompt; give one behind MODEL")
    if os.path.exists(prompt):
        raise InputError(f"the prompt {prompt!r} is a file or folder; to read it, put --text before it")
    _refuse("a prompt is read by itself", others)


def model_and_prompt(first: str | None, second: str | None) -> tuple[str | None, str]:
    """The model, None for the default one, and the prompt: a sentence by itself is a prompt.

    Raises:
        InputError: there is none, but a single word or a folder, which may be a model's name.
    """
    if second is not None:
        return first, second
    if first is None or len(first.split()) < 2 or os.path.exists(first):
        behind = "" if first is None else f", which is {first!r}"
        raise InputError(f"there is no prompt: put one behind MODEL{behind}, or give a sentence alone")
    return None, first


def given_prompt(prompt: str | None, chat: bool) -> Any:
    """A prompt as `massieu.attention_weights` takes it."""
    return [{"role": "user", "content": prompt}] if chat else prompt


def _refuse(reason: str, options: dict[str, Any]) -> None:
    """Raise an InputError if one of these options was set."""
    names = [name for name, value in options.items() if value is not None]
    if names:
        raise InputError(f"{reason}: leave out {', '.join(names)}")


def replacements_of(
    rules: Sequence[str] | None, per: str, windows: int, statistics: "Sequence[Named] | None"
) -> "list[Replacement]":
    """A replacement for each rule, all at the same places and on the same number of windows.

    Without a rule, the group "replacement" of the statistics replaces each head by its mean.

    Raises:
        InputError: a `Replacement` refuses its options, or a statistic is unknown.
    """
    from massieu.probing.replaced.replacement import Replacement
    from massieu.probing.replaced.rules import MEAN
    from massieu.probing.statistics.catalogue import Selection
    from massieu.probing.statistics.registry import REPLACEMENT

    places: Any = per
    replacements = [Replacement(rule, per=places, windows=windows) for rule in rules or ()]
    if not replacements and REPLACEMENT in Selection.of(statistics).groups:
        replacements = [Replacement(MEAN, per="head", windows=windows)]
    return replacements


def statistics_options(statistics: "list[Named] | None", quick: bool, draws: int | None) -> dict[str, Any]:
    """The probe's options `statistics` and `draws`; a quick run of named statistics has no control."""
    if quick and statistics is None:
        return {"statistics": "quick"}
    if quick:
        return {"statistics": statistics, "draws": 0}
    if draws is None:
        return {"statistics": statistics}
    return {"statistics": statistics, "draws": draws}


def models_of(models: Sequence[str], revisions: Sequence[str] | None, loading: dict[str, Any]) -> list[Any]:
    """The models to compare, with the options of loading them; folders of results stay as they are.

    Raises:
        InputError: several models were named with revisions, or a `Checkpoint` refuses its options.
    """
    from massieu.probing.compare.run import is_result
    from massieu.probing.model.given import Checkpoint

    if revisions is None:
        return [name if is_result(name) else Checkpoint(name, **loading) for name in models]
    if len(models) != 1:
        raise InputError(f"revisions are of one model on the hub, named once; {len(models)} models were given")
    return [Checkpoint(models[0], revision=revision, **loading) for revision in revisions]
