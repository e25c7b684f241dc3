"""What a command was given, as the objects that the probe takes: the model, the data, the replacements."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from massieu.errors import InputError

if TYPE_CHECKING:
    from massieu.probing.data.given import Data
    from massieu.probing.replaced.replacement import Replacement
    from massieu.probing.statistics.catalogue import Named


def given_data(
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
    """Images where there are any, pairs where columns of both sides are named, else text.

    Raises:
        InputError: options that do not go together; what the objects refuse.
    """
    from massieu.probing.data.given import Images, Pairs, Text

    of_windows = {"--bos": bos, "--generate": generate, "--no-packing": no_packing or None, "--column": column}
    if images is not None:
        of_text = {"--text": text, "--source": source, "--target": target, "--max-length": max_length}
        _refuse("images are read in place of text", {**of_text, "--max-tokens": max_tokens, **of_windows})
        return Images(images, tokenizer)
    if source is not None or target is not None:
        _refuse("source and target are columns of pairs", of_windows)
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


def given_prompt(prompt: str | None, chat: bool) -> Any:
    """A prompt as `massieu.attention_weights` takes it."""
    return [{"role": "user", "content": prompt}] if chat else prompt


def _refuse(why: str, options: dict[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(f"{why}: leave out {', '.join(given)}")


def given_replacements(
    rules: Sequence[str] | None, per: str, windows: int, statistics: "Sequence[Named] | None"
) -> "list[Replacement]":
    """The rules, all of them put in the same place and measured on so many windows, as the group "replacement" is too.

    Raises:
        InputError: what a `Replacement` refuses; an unknown statistic.
    """
    from massieu.probing.replaced.replacement import Replacement
    from massieu.probing.replaced.rules import MEAN
    from massieu.probing.statistics.catalogue import Selection
    from massieu.probing.statistics.registry import REPLACEMENT

    chosen: Any = per
    found = [Replacement(rule, per=chosen, windows=windows) for rule in rules or ()]
    if not found and REPLACEMENT in Selection.of(statistics).groups:
        found = [Replacement(MEAN, per="head", windows=windows)]
    return found


def given_statistics(statistics: "list[Named] | None", quick: bool, draws: int | None) -> dict[str, Any]:
    """Which statistics are measured, and with how many draws; a quick run of statistics that are named has no control."""
    if quick and statistics is None:
        return {"statistics": "quick"}
    if quick:
        return {"statistics": statistics, "draws": 0}
    return {"statistics": statistics} | ({} if draws is None else {"draws": draws})


def given_models(models: Sequence[str], revisions: Sequence[str] | None, loading: dict[str, Any]) -> list[Any]:
    """Models to compare, with how they are loaded; folders of results stay as they are.

    Raises:
        InputError: several models, and revisions; what a `Checkpoint` refuses.
    """
    from massieu.probing.compare.run import is_result
    from massieu.probing.model.given import Checkpoint

    if revisions is None:
        return [name if is_result(name) else Checkpoint(name, **loading) for name in models]
    if len(models) != 1:
        raise InputError(f"revisions are of one model on the hub, named once; {len(models)} models were given")
    return [Checkpoint(models[0], revision=each, **loading) for each in revisions]
