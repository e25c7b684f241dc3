"""`probe`: a model and text in, a result out; and `describe`: what would be read, without any text."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.foundation.arguments import flag, of_class, real, whole_number
from massieu.foundation.doors import any_of, count, function, input_door, path, sequence, text
from massieu.foundation.doors import seed as check_seed
from massieu.interruption import Interruption, interruptible
from massieu.probing.model.forward import named_inputs
from massieu.probing.model.model import dummy_inputs, load_tokenizer
from massieu.probing.reading.options import Options
from massieu.probing.reading.per_token import check_per_token
from massieu.probing.replaced.effect import Replace
from massieu.probing.result.result import ProbeResult
from massieu.probing.session.course import STORE_EVERY, course_for
from massieu.probing.session.draws import DRAWS
from massieu.probing.session.session import Input, ProbeProgress, Session
from massieu.probing.session.sharing import Sharing
from massieu.probing.session.sources import load_given, of_images, of_text
from massieu.probing.statistics.catalogue import Named, Selection
from massieu.probing.statistics.registry import (
    ATTENTION,
    CLIMB,
    MAPS,
    REPEATED,
    REPLACEMENT,
)
from massieu.probing.sums.units import Units
from massieu.report.record import ModelRecord, SiteRecord, Sublayer, plain


@input_door(
    model=any_of("a name, a path or a torch.nn.Module", str, Path, nn.Module),
    seed=check_seed,
    max_length=count,
    max_tokens=whole_number,
    batch_size=count,
    query_sample=count,
    generate=count,
    replace_windows=count,
    store_every=real,
    trust_remote_code=flag,
    distributed=flag,
    resume=flag,
    quick=flag,
    packing=flag,
    revision=text,
    progress=function,
    running=path,
    column=text,
    source=text,
    target=text,
    bos=flag,
    sharing=partial(of_class, kind="Sharing"),
    statistics=sequence,
    texts=any_of("a string or a list of strings", str, Iterable),
    text=any_of("a path or a list of paths", str, os.PathLike, Iterable),
)
@torch.inference_mode(False)  # slopes need derivatives, wherever the caller stands
def probe(
    model: str | Path | nn.Module | None = None,
    tokenizer_or_batches: Any = None,
    *,
    text: Sequence[str | Path] | str | Path | None = None,
    texts: Iterable[Any] | None = None,
    images: Iterable[Any] | str | Path | None = None,
    column: str | None = None,
    source: str | None = None,
    target: str | None = None,
    statistics: Sequence[Named] | None = None,
    max_length: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    packing: bool = True,
    bos: bool | None = None,
    query_sample: int | None = None,
    generate: int | None = None,
    replace: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
    replace_per: Literal["all", "site", "head"] = "all",
    replace_windows: int = 16,
    quick: bool = False,
    draws: int | None = None,
    per_token: bool | Sequence[str] = False,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
    distributed: bool = False,
    running: str | Path | None = None,
    resume: bool = False,
    store_every: float = STORE_EVERY,
    progress: Callable[[ProbeProgress], None] | None = None,
    sharing: Sharing | None = None,
) -> ProbeResult:
    """Measure every attention head and residual step of a transformer on text: weights, entropy, log Z, controls.

    The model's outputs stay its own (checked on the first batch); statistics are computed beside the forward pass and
    kept as running results, so memory does not grow with the text.

    Args:
        model: a folder (of a model, or of an adapter to one), a GGUF file, a hub name, any module in memory, or None for the
            MiniLM sentence encoder. What wraps a module is taken off: DDP, ``torch.compile``, PEFT, SentenceTransformer.
        tokenizer_or_batches: for a model in memory, its tokenizer, the folder or hub name of that, or an iterable of batches as
            its forward takes them: a tensor, a tuple (arguments in order) or a mapping (by name). Padding is known from a
            mask (B, L) in a mapping: ``attention_mask`` is True at real tokens, ``key_padding_mask``,
            ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are True at padding. A model loaded by name brings its own
            tokenizer.
        text: files, folders or ``"-"``; None is the English reference text that every Python ships.
        texts: the text itself, in place of ``text``: a string, a document in each string, or a ``Dataset`` or
            ``IterableDataset`` of the package `datasets`.
        column: column of a data set or of a file, or field of JSON objects, that holds the text; None is "text".
        source, target: for an encoder–decoder, in place of ``column``: the columns of the texts that the encoder and the
            decoder read, each pair in a row of its own. ``texts`` may then be pairs of strings, without such names.
        statistics: names of statistics or groups, and functions of your own (see `massieu.statistic`) or your own groups; None
            is all of the package's that are cheap.
        max_length: tokens in a window, or in each side of a pair; None is 256, or as many as the model has positions for if
            these are fewer.
        max_tokens: stop after this many tokens.
        batch_size: windows in a batch; it changes no number beyond rounding.
        packing: cut the text into full windows; False keeps one document per row, with padding. Of batches, False says that
            their rows are documents: independent, where windows of one text are like their neighbours.
        bos: whether rows of text begin with the BOS token; None leaves it to the tokenizer's own setting. The page and
            the terminal say which.
        query_sample: at most this many queries per window for the per-query statistics (long inputs).
        generate: each document is a prompt, and the model writes at most this many tokens after it, by its own ``generate``
            with a cache. The attention statistics are then those of the query that each new token came of.
        replace: rules, as for `massieu.replaced`, and ``"off(mean)"``, each head's mean output over the text. What each
            changes is in ``result.run.replacements``: the loss of a model that predicts the next token, else its output.
        replace_per: everywhere at once, or for each attention site or each head by itself: a forward pass a window for each.
        replace_windows: on so many sampled windows.
        quick: the attention's statistics alone, with standard errors: no re-initialised control, no examples, and a
            self-check on one window in place of two.
        draws: so many re-initialised models are drawn, one at a time, and heads are compared with the law of theirs; None is
            8. With fewer than 4 the law's tails cannot be seen, and heads have to differ by twice as much.
        per_token: True writes the value of every statistic of the attention at every query, a list of names those alone;
            `massieu.ProbeResult.tokens` reads them. The rows go into ``running``, else into a temporary folder, and
            ``save`` puts them beside the tables. About 4 bytes for each value.
        device, dtype: where and in which type a model is loaded by name; a GPU where there is one, and float32.
        seed: of everything that is drawn: samples, directions and the re-initialised copy.
        revision, trust_remote_code: as for ``from_pretrained`` of ``transformers``.
        device_map: in place of ``device``, for a model that is larger than one: "auto" spreads its layers over the devices,
            main memory and the disk; needs `accelerate`.
        distributed: the processes of the default group of ``torch.distributed`` share the text: each is given all of it,
            reads its batches and gets the result of all. Where a model is loaded by name, each loads its own.
        running: a folder to store running sums in, every ``store_every`` minutes and when Ctrl-C ends the reading, and
            the rows of ``per_token``. With ``replace`` nothing is stored there, since such a run begins at the beginning.
        resume: go on from what is stored in ``running``, by a run of the same model, text and settings; the result is the
            one of a run without a break. Where nothing is stored, the reading begins at the beginning.
        store_every: minutes.
        progress: called after every batch.
        sharing: what this probe has in common with others; `massieu.compare` gives it.

    Returns:
        The result; ``complete`` is False when Ctrl-C ended it early.

    Raises:
        InputError: bad input of any kind, named in one sentence; also when the self-check finds that what was captured
            does not reproduce the model's own attention, and where no attention can be read, with the reasons.
        ProcessLostError: another process that shares the text has ended before its time.

    Example:
        Two heads of a small model, each with an entropy below log 8 = 2.08 nats.

        >>> import massieu
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> result = massieu.probe(model, [{"input_ids": torch.arange(8)[None]}], statistics=["entropy"])
        >>> [0 < row["value"] < 2.08 for row in result.heads.rows(named=True) if row["statistic"] == "entropy"]
        [True, True]
    """
    if not isinstance(quick, bool):
        raise InputError(f"quick must be True or False, got {quick!r}")
    selection = (Selection.of_quick if quick else Selection.of)(statistics)
    wanted, groups = selection.names, selection.groups
    draws = DRAWS if draws is None else draws
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 2:
        raise InputError(f"draws must be a whole number, 2 or more, got {draws!r}; quick leaves the control out")
    rows = check_per_token(per_token, selection)
    replacing = Replace.create(replace, replace_per, replace_windows)
    if REPLACEMENT in groups:
        replacing = replacing.with_heads()
    sizes: dict[str, Any] = {"max_length": max_length, "max_tokens": max_tokens, "batch_size": batch_size}
    for name, value in {
        **sizes,
        "query_sample": query_sample,
        "generate": generate,
        "replace_windows": replace_windows,
    }.items():
        least = 4 if name == "max_length" else 1
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    loading: dict[str, Any] = {"device": device, "dtype": dtype, "revision": revision}
    loading |= {"trust_remote_code": trust_remote_code, "device_map": device_map}
    settings = {"statistics": selection.asked, "column": column, "packing": packing}
    if own := selection.catalogue.digests():
        settings |= {"own_statistics": own}
    settings |= {"source": source, "target": target, "bos": bos}
    if isinstance(tokenizer_or_batches, str | Path) and images is None:
        settings |= {"tokenizer": str(tokenizer_or_batches)}
        tokenizer_or_batches = load_tokenizer(tokenizer_or_batches, trust_remote_code=trust_remote_code)
    settings |= {**sizes, "query_sample": query_sample, "generate": generate, "quick": quick, "draws": draws, **loading}
    if generate is not None:
        wanted, groups, packing = _while_generating(selection), frozenset({ATTENTION}), False
        loading["head"] = True
        if rows:
            raise InputError("per_token and generate do not work together: give one of them")
        if replacing.wanted:
            raise InputError("replace and generate do not work together: give one of them")
    if replacing.wanted:
        settings |= {"replace": [f"{name} for {per}" for name, _, per in replacing.rules]}
        loading.setdefault("head", "if any")
        if distributed or resume:
            raise InputError(
                "replace needs a single process that reads from the beginning: leave out torchrun and resume"
            )
        running = None  # the windows that are run again are in no running sums, so none could be gone on from
    if REPEATED in groups:
        loading.setdefault("head", "if any")
    if rows:
        settings |= {"per_token": list(rows)}
        if distributed and running is None:
            raise InputError(
                "per_token with distributed=True needs running=, a folder that all processes write their rows to"
            )
    course = course_for(distributed, running, resume, store_every, settings)
    tell = progress or (lambda _: None)
    if images is not None:
        settings_of_text = {
            "text": text,
            "source": source,
            "target": target,
            "generate": generate,
            "max_tokens": max_tokens,
            "bos": bos,
        }
        loaded, given = of_images(model, tokenizer_or_batches, images, texts, settings_of_text, sizes, loading, tell)
    else:
        asked = (text, texts, source, target, column, packing, generate, bos)
        loaded, given = of_text(model, tokenizer_or_batches, asked, sizes, loading, sharing, tell)
    units = Units(mode="window" if given.packing else "document")
    options = Options(
        groups, units, given.max_length, query_sample, seed=seed, statistics=wanted, quick=quick, new_tokens=generate,
        replace=replacing, per_token=rows, draws=draws, catalogue=selection.catalogue,
    )  # fmt: skip
    settings["max_length"] = course.settings["max_length"] = given.max_length
    with interruptible() as interruption:
        if resume and not course.found():
            tell(ProbeProgress(f"nothing is stored in {running}: reading from the beginning"))
        session = Session(
            loaded, given, options, _holding(tell, interruption), max_tokens, course=course, sharing=sharing
        )
        complete = session.read_all(interruption.asked) and session.replace_all(interruption.asked)
        tell(ProbeProgress("writing", session.tokens, max_tokens, session.read))
        return session.result(wanted, settings, complete)


def _while_generating(selection: Selection) -> frozenset[str]:
    """The statistics of new tokens: those of attention.

    Raises:
        InputError: another one was named.
    """
    others = selection.others()
    if others and selection.named:
        raise InputError(
            f"while a model generates, only statistics of attention are measured, not {', '.join(sorted(others))}"
        )
    return selection.names - others


def _holding(tell: Callable[[ProbeProgress], None], interruption: Interruption) -> Callable[[ProbeProgress], None]:
    """Once a batch was measured, an interruption waits for what can be kept of it."""

    def tell_and_hold(state: ProbeProgress) -> None:
        if state.windows:
            interruption.hold()
        tell(state)

    return tell_and_hold


@dataclass(frozen=True, eq=False)
class Description:
    """What a probe would read in a model."""

    model: ModelRecord
    route: str
    sites: list[SiteRecord]
    sublayers: list[Sublayer]
    unavailable: list[str]
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON can hold it."""
        return plain(vars(self))


@input_door(
    model=any_of("a name, a path or a torch.nn.Module", str, Path, nn.Module), trust_remote_code=flag, revision=text
)
@torch.inference_mode(False)
def describe(
    model: str | Path | nn.Module | None = None,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | dict[str, Any] | None = None,
) -> Description:
    """Find the attention layers, heads and residual steps of a model from one tiny made-up input; needs no text.

    Args:
        model: as for `probe`.
        inputs: one batch, in any form that `probe` takes; needed where the model does not say what it reads.

    Raises:
        InputError: as for `probe`; also when the model reads neither tokens nor images and ``inputs`` is not given.

    Example:
        A model of `transformers`, then one attention of PyTorch's own.

        >>> import massieu
        >>> from transformers import BertConfig, BertModel
        >>> small = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = BertModel(small).eval()
        >>> [(site.kind, site.heads, site.head_size) for site in massieu.describe(model).sites]
        [('self', 2, 4)]
        >>> import torch
        >>> tokens = torch.ones(1, 5, 8)
        >>> attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> [(site.kind, site.heads, site.route) for site in massieu.describe(attention, (tokens,) * 3).sites]
        [('self', 2, 'tap')]
    """
    loading: dict[str, Any] = {"device": device, "dtype": dtype, "revision": revision}
    loading |= {"trust_remote_code": trust_remote_code, "device_map": device_map}
    loaded = load_given(model, None, needs_tokenizer=False, **loading)
    ready = dummy_inputs(loaded.module) if inputs is None else named_inputs(loaded.module, inputs)
    options = Options(frozenset({CLIMB, MAPS}), Units(), 256, climb_queries=4)
    given = Input([ready], "made-up input", True, 256, None)
    session = Session(loaded, given, options, lambda _: None, None)
    session.begin(ready)
    session.read_all(threading.Event())
    sites = [session.site_record(info) for info in session.reading.sites]
    reasons = sorted({f"{k}: {reason}" for site in sites for k, reason in site.unavailable.items()})
    sublayers = session.reading.tracer.sublayers
    trouble = session.trouble()
    warnings = [*([] if trouble is None else [trouble.sentence]), *session.all_warnings()]
    return Description(session.model_record(), session.route(), sites, sublayers, reasons, warnings)
