"""What the commands print of one prompt: the weights of a head and its picture, or the largest numbers of all heads."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.cli.output import check_picture
from massieu.cli.streams import say, show
from massieu.errors import InputError
from massieu.report.encode import encodable
from massieu.storage.writing import write_whole

if TYPE_CHECKING:
    from massieu.probing.model.given import Checkpoint
    from massieu.probing.weights.prompt_summary import HeadNumber, PromptSummary
    from massieu.probing.weights.site_weights import StrongWeight


@dataclass(frozen=True)
class HeadPicture:
    """One head's weights on a prompt: what is asked for."""

    layer: int
    head: int
    site: str | None
    path: Path
    count: int
    json: bool

    def make(self, model: "Checkpoint", prompt: Any, tokenizer: str | None) -> None:
        """Read the weights, write the picture, print the largest.

        Raises:
            InputError: as `massieu.attention_weights`; the picture cannot be written.
        """
        from massieu.probing.weights.attention_weights import attention_weights

        format = check_picture(self.path)
        result = attention_weights(model, prompt, layers=self.layer, heads=self.head, tokenizer=tokenizer)
        site = result.site_of(self.layer, self.head, self.site)
        picture = BytesIO()
        result.plot(self.layer, self.head, site=site.name).figure.savefig(picture, format=format)
        write_whole(self.path, picture.getvalue(), "the picture")
        if self.json:
            found = {
                "model": result.model,
                "site": site.name,
                "layer": self.layer,
                "head": self.head,
                "query_tokens": site.query_tokens and site.query_tokens[0],
                "key_tokens": site.key_tokens and site.key_tokens[0],
                "weights": site.of_head(self.head)[0].tolist(),
                "picture": str(self.path),
            }
            show(dumps(encodable(found), ensure_ascii=False, allow_nan=False))
            return
        show(f"{result.model}, {site.name}: layer {self.layer}, head {self.head}")
        show_weights(site.strongest(self.count), with_head=False)
        _say_refused(result.refused)
        show(f"picture: {self.path}")


def head_of(given: str) -> tuple[int, int]:
    """Layer and head of such a text as ``5.1``.

    Raises:
        InputError: it is something else.
    """
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", given.strip())
    if found is None:
        raise InputError(f"a head is LAYER.HEAD, counted from 0, such as 5.1; got {given!r}")
    return int(found[1]), int(found[2])


def show_summary(found: "PromptSummary") -> None:
    """The largest numbers of all heads on one prompt, ranked."""
    show(f"{found.model}: one prompt of {found.tokens:,} tokens, {found.heads:,} heads")
    show("One prompt has no error and no control: another prompt may give other numbers.")
    show("'massieu probe MODEL --text PATH' measures on text, with both.")
    show()
    show(
        ", the largest of each head; tokens that see one key, and weights on the first token, are left out",
        bold="Weights",
    )
    several = found.has_several_sites
    show_weights(found.weights, with_head=True, with_site=several)
    _show_heads("Mean weight on the first token", ", of the tokens behind it", found.on_first, several)
    _show_heads("Mean distance to the keys", ", in tokens", found.distance, several)
    _say_refused(found.refused)


def _say_refused(refused: dict[str, str]) -> None:
    for name, reason in refused.items():
        say(f"warning: the attention of {name} is not read: {reason}")


def show_weights(weights: "Sequence[StrongWeight]", *, with_head: bool, with_site: bool = False) -> None:
    """A line for each weight: what attends to what, and what uniform attention would give."""
    for each in weights:
        head = f"{each.layer}.{each.head}".ljust(8) if with_head else ""
        tokens = f"{_shown(each.query_token)} {each.query} → {_shown(each.key_token)} {each.key}"
        site = f"  {each.site}" if with_site else ""
        show(f"  {head}{each.weight:.3f}  {tokens}  (uniform: {1 / each.visible:.3f}){site}")


def _show_heads(title: str, meaning: str, rows: "Iterable[HeadNumber]", with_site: bool) -> None:
    show()
    show(meaning, bold=title)
    for row in rows:
        site = f"  {row.site}" if with_site else ""
        show(f"  {f'{row.layer}.{row.head}'.ljust(8)}{row.value:.3f}{site}")


def _shown(token: str | None) -> str:
    from massieu.report.tokens import readable

    return "token" if token is None else f"'{readable([token])[0]['text']}'"
