"""`probe`: a model and text in, a result out; and `describe`: what would be read, without any text."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.interruption import Interruption, interruptible
from massieu.probing.check import check_readable
from massieu.probing.documents import Document, check_sources, read_documents, reference_documents, string_documents
from massieu.probing.forward import named_inputs
from massieu.probing.model import LoadedModel, as_loaded, dummy_inputs, load_model
from massieu.probing.reading import Options
from massieu.probing.result import ProbeResult
from massieu.probing.session import Input, ProbeProgress, Session
from massieu.probing.statistics.registry import CLIMB, MAPS, select
from massieu.probing.text import TextBatches
from massieu.probing.tokenizers import check_tokenizer
from massieu.probing.units import Units
from massieu.report.record import ModelRecord, SiteRecord, Sublayer, plain


@torch.inference_mode(False)  # slopes need derivatives, wherever the caller stands
def probe(
    model: str | Path | nn.Module | None = None,
    tokenizer_or_batches: Any = None,
    *,
    text: Sequence[str | Path] | str | Path | None = None,
    texts: Sequence[str] | str | None = None,
    column: str | None = None,
    statistics: Sequence[str] | None = None,
    max_length: int = 256,
    max_tokens: int | None = None,
    batch_size: int = 8,
    packing: bool = True,
    query_sample: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[ProbeProgress], None] | None = None,
) -> ProbeResult:
    """Read every attention head and every residual step of a transformer as statistical mechanics.

    The model's outputs stay its own (checked on the first batch); statistics are computed beside the forward pass and
    kept as running results, so memory does not grow with the text.

    Args:
        model: a folder (of a model, or of an adapter to one), a GGUF file, a hub name, any module in memory, or None for the
            MiniLM sentence encoder. What wraps a module is taken off: DDP, ``torch.compile``, PEFT, SentenceTransformer.
        tokenizer_or_batches: for a model in memory, its tokenizer, or an iterable of batches as its forward takes them: a
            tensor, a tuple (arguments in order) or a mapping (by name). Padding is known from a mask (B, L) in a mapping:
            ``attention_mask`` is True at real tokens, ``key_padding_mask``, ``src_key_padding_mask`` and
            ``tgt_key_padding_mask`` are True at padding. Not needed for a folder or hub name.
        text: files, folders or ``"-"``; None is the English reference text that every Python ships.
        texts: the text itself, in place of ``text``: a string, or a document in each string.
        column: field of ``.jsonl`` and ``.parquet`` files that holds the text.
        statistics: names of statistics or groups; None is all of them.
        max_length: tokens in a window.
        max_tokens: stop after this many tokens.
        batch_size: windows in a batch; it changes no number beyond rounding.
        packing: cut the text into full windows; False keeps one document per row, with padding.
        query_sample: at most this many queries per window for the per-query statistics (long inputs).
        device, dtype: where and in which type a model is loaded by name; a GPU where there is one, and float32.
        seed: of everything that is drawn: samples, directions and the re-initialised copy.
        revision, trust_remote_code: as for ``from_pretrained`` of ``transformers``.
        progress: called after every batch.

    Returns:
        The result; ``complete`` is False when Ctrl-C ended it early.

    Raises:
        InputError: bad input of any kind, named in one sentence; also when the self-check finds that what was captured
            does not reproduce the model's own attention, and where no attention can be read, with the reasons.

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
    wanted, groups = select(statistics)
    sizes: dict[str, Any] = {"max_length": max_length, "max_tokens": max_tokens, "batch_size": batch_size}
    for name, value in {**sizes, "query_sample": query_sample}.items():
        least = 4 if name == "max_length" else 1
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    loading = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    settings = {"statistics": None if statistics is None else list(statistics), "column": column, "packing": packing}
    settings |= {**sizes, "query_sample": query_sample, **loading}
    source, documents = _documents(text, texts, column, check=not isinstance(model, nn.Module))
    tell = progress or (lambda _: None)
    tell(ProbeProgress("loading the model"))
    loaded = _load(model, tokenizer_or_batches, needs_tokenizer=tokenizer_or_batches is None, **loading)
    if tokenizer_or_batches is not None and not callable(tokenizer_or_batches):
        if text is not None or texts is not None:
            raise InputError("give either batches or text, not both")
        given = Input(_batches(tokenizer_or_batches), "batches", True, max_length, loaded.tokenizer)
    else:
        tokenizer = _tokenizer(loaded, tokenizer_or_batches, max_length)
        batches = TextBatches(tokenizer, documents, **sizes, packing=packing)
        given = Input(batches, source, packing, max_length, tokenizer)
    units = Units(mode="window" if given.packing else "document")
    options = Options(groups, units, max_length, query_sample, seed=seed)
    with interruptible() as interruption:
        session = Session(loaded, given, options, _holding(tell, interruption), max_tokens)
        complete = session.read_all(interruption.asked)
        tell(ProbeProgress("writing", session.tokens, max_tokens, session.windows))
        return session.result(wanted, settings, complete)


def _holding(tell: Callable[[ProbeProgress], None], interruption: Interruption) -> Callable[[ProbeProgress], None]:
    """Once a batch was measured, an interruption waits for what can be kept of it."""

    def tell_and_hold(state: ProbeProgress) -> None:
        if state.windows:
            interruption.hold()
        tell(state)

    return tell_and_hold


def _documents(
    text: Sequence[str | Path] | str | Path | None, texts: Sequence[str] | str | None, column: str | None, check: bool
) -> tuple[str, Callable[[], Iterable[Document]]]:
    """What the text is, in words, and a function that reads it."""
    if text is not None and texts is not None:
        raise InputError("give either text (files and folders) or texts (strings), not both")
    if texts is not None:
        strings = string_documents(texts)
        return "1 string" if len(strings) == 1 else f"{len(strings):,} strings", lambda: strings
    if text is None:
        return "pydoc_data.topics (the reference text that ships with Python)", reference_documents
    sources = [text] if isinstance(text, str | Path) else list(text)
    if check:
        check_sources(sources, column=column)
    return ", ".join(map(str, sources)), lambda: read_documents(sources, column=column)


def _batches(given: Any) -> Iterable[Any]:
    """Several batches; one batch in their place is a common mistake, which iterating would hide."""
    if isinstance(given, Tensor | Mapping) or not isinstance(given, Iterable):
        raise InputError(f"batches must be an iterable of batches, got {type(given).__name__}; put one batch in a list")
    return given


def _load(model: str | Path | nn.Module | None, tokenizer: Any, needs_tokenizer: bool, **loading: Any) -> LoadedModel:
    if isinstance(model, nn.Module):
        if loading["device"] is not None or loading["dtype"] is not None:
            raise InputError("device and dtype belong to models loaded by name; move a model in memory yourself")
        return as_loaded(model, tokenizer if callable(tokenizer) else None)
    loaded = load_model(model, tokenizer=needs_tokenizer, **loading)
    check_readable(loaded.module)
    return loaded


def _tokenizer(loaded: LoadedModel, tokenizer: Any, max_length: int) -> Any:
    """The tokenizer that was given or else the model's own, once it is sure that the model reads what comes of it."""
    tokenizer = loaded.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        reason = f" ({loaded.tokenizer_problem})" if loaded.tokenizer_problem else ""
        raise InputError(
            f"{loaded.name} has no tokenizer{reason}, so it cannot read text; give batches of its inputs from Python: "
            "massieu.probe(model, batches)"
        )
    check_tokenizer(tokenizer, loaded.module, loaded.name)
    longest = _longest(loaded.module)
    if longest is not None and max_length > longest:
        raise InputError(f"max_length {max_length} is more than the {longest} positions that {loaded.name} has")
    return tokenizer


def _longest(module: nn.Module) -> int | None:
    """Positions an absolute position table has; None where there is no such table."""
    config: Any = getattr(module, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            return (
                positions - 2
                if getattr(config, "model_type", None) in ("roberta", "xlm-roberta", "camembert")
                else positions
            )
    return None


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


@torch.inference_mode(False)
def describe(
    model: str | Path | nn.Module | None = None,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Description:
    """Find the attention sites, heads and wiring of a model from one tiny made-up input; no text is needed.

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
    loading = {"device": device, "dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code}
    loaded = _load(model, None, needs_tokenizer=False, **loading)
    ready = dummy_inputs(loaded.module) if inputs is None else named_inputs(loaded.module, inputs)
    options = Options(frozenset({CLIMB, MAPS}), Units(), 256, climb_queries=4)
    given = Input([ready], "made-up input", True, 256, None)
    session = Session(loaded, given, options, lambda _: None, None)
    session.begin(ready)
    session.control = None
    session.read_all(threading.Event())
    sites = [session.site_record(info) for info in session.reading.sites]
    reasons = sorted({f"{k}: {reason}" for site in sites for k, reason in site.unavailable.items()})
    sublayers = session.reading.tracer.sublayers
    trouble = session.trouble()
    warnings = [*([] if trouble is None else [trouble.sentence]), *session.all_warnings()]
    return Description(session.model_record(), session.route(), sites, sublayers, reasons, warnings)
