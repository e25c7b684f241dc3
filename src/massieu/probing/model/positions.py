"""How many positions a model has for tokens."""

from typing import Any

from torch import nn

from massieu.probing.model.tokenizers import embedded

_MORE_ROWS = 2  # rows that a table of positions may have beyond the configuration's number, as OPT's
_SETTINGS = (
    ("max_position_embeddings",),
    ("n_positions",),
    ("max_seq_len",),  # of MPT's biases by position
    ("max_encoder_position_embeddings", "max_decoder_position_embeddings"),  # LED: both sides read the same text
)


def max_positions(module: nn.Module) -> int | None:
    """Positions that an absolute position table has for tokens; None where there is no such table."""
    rows = config_positions(getattr(module, "config", None))
    table = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
    padding_row = getattr(table, "padding_idx", None)
    if rows is None or padding_row is None:
        return rows
    # In the RoBERTa family the positions of tokens come behind the row of padding.
    return rows - padding_row - 1


def max_table_positions(module: nn.Module) -> int | None:
    """As `max_positions` for models that look positions up in a table, and cannot read beyond it; None for all others."""
    rows = config_positions(getattr(module, "config", None))
    if rows is None:
        return None
    tokens = _token_table(module)
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part is not tokens]
    has_table = any(rows <= table.num_embeddings <= rows + _MORE_ROWS for table in tables)
    return max_positions(module) if has_table else None


def config_positions(config: Any) -> int | None:
    """Rows of the position table that a configuration names; a few of them may be no token's. None without such a table."""
    for names in _SETTINGS:
        values = [getattr(config, name, None) for name in names]
        lengths = [value for value in values if isinstance(value, int) and value > 0]
        if lengths:
            return min(lengths)
    return None


def _token_table(module: Any) -> nn.Module | None:
    return module.get_input_embeddings() if embedded(module) is not None else None
