"""Made-up but realistic probe results, drawn from a seeded generator: what the page's tests look at."""

import copy
from typing import Any, NamedTuple

import numpy as np
import polars
from tests.support.report import synthetic_catalogue as catalogue

PASSAGE = (
    "[CLS] an assignment statement ev ##alu ##ates the expression list and assigns the single resulting object to each "
    "of the target lists , from left to right . assignment is defined rec ##urs ##ively depending on the form of the "
    "target ; when a target is part of a mut ##able object the object must ultimately perform the assignment [SEP]"
)
WORDS = PASSAGE.split()
HOSTILE = [
    "</script><script>window.hacked=1</script>", '"><img src=x onerror=window.hacked=1>', "{{7*7}}", "<!--", "'",
    "&lt;", "\n", "\t", "   ", "", "Ġworld", "##ing", "▁word", "Ċ", "<0x0A>", "\u202eevil", "\u2028",
    "`${window.hacked=1}`", "\ud800", "é",
]  # fmt: skip


class Results(NamedTuple):
    run: Any  # a dictionary as `run.json` holds it; of the fixture, the record
    details: dict[str, Any]
    heads: polars.DataFrame
    layers: polars.DataFrame


SCHEMA = {"site": polars.String, "layer": polars.Int32, "head": polars.Int32, "statistic": polars.String,
          "value": polars.Float64, "standard_error": polars.Float64, "count": polars.Int64}  # fmt: skip


class Rows:
    """Collects the rows of a long table; NaN becomes null."""

    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(
        self, site: str, layer: int, statistic: str, values: Any, error: float, count: int, heads: bool = True
    ) -> None:
        for head, value in enumerate(np.atleast_1d(np.asarray(values, dtype=float)).tolist()):
            self.rows.append((site, layer, head if heads else None, statistic, value, error, count))

    def table(self) -> polars.DataFrame:
        frame = polars.DataFrame(self.rows, schema=SCHEMA, orient="row")
        return frame.with_columns(polars.col("value", "standard_error").fill_nan(None))


def empty_table() -> polars.DataFrame:
    return Rows().table()


def self_attention_sites(layers: int, heads: int, stem: str = "encoder.layer", kind: str = "self") -> list[dict]:
    return [
        {"index": layer, "name": f"{stem}.{layer}.attention.self", "layer": layer, "kind": kind, "heads": heads,
         "key_heads": heads, "head_size": 32, "query_tokens": "text", "key_tokens": "text",
         "unavailable": {"sink_weight": "the model has no learned sink"}}
        for layer in range(layers)
    ]  # fmt: skip


def post_norm_sublayers(layers: int, stem: str = "encoder.layer") -> list[dict]:
    kinds = [("attention", "attention"), ("attention norm", "norm"), ("feed-forward", "feed_forward"),
             ("feed-forward norm", "norm")]  # fmt: skip
    return [
        {"index": 4 * layer + place, "name": f"{stem}.{layer} {word}", "layer": layer, "kind": kind}
        for layer in range(layers)
        for place, (word, kind) in enumerate(kinds)
    ]


def head_rows(sites: list[dict], rng: np.random.Generator) -> polars.DataFrame:
    rows = Rows()
    for site in sites:
        name = site["name"]
        layer = site["layer"]
        size = site["heads"]
        for statistic, *_, unit, flags, control, _question, centre, spread in catalogue.ROWS:
            value = centre + spread * rng.standard_normal(size)
            if "s" not in flags:
                value = np.abs(value)
            if unit in ("", "share of queries") and "cosine" not in statistic and "norm" not in statistic:
                value = np.clip(value, 0.01, 0.99)
            error = 0.04 * spread
            rows.add(name, layer, statistic, value, error, 24_576)
            rows.add(name, layer, f"{statistic}/spread", np.abs(value) * 0.3, np.nan, 24_576)
            for half, sign in (("first_half", 1), ("second_half", -1)):
                rows.add(name, layer, f"{statistic}/{half}", value + sign * error, 1.4 * error, 12_288)
            if control is None:
                continue
            controls = ("random", "mismatched", "reinitialised") if "_s" in statistic and "s" in flags else (control,)
            for one in {control, *controls}:
                null = centre + 0.2 * spread * rng.standard_normal(size)
                rows.add(name, layer, f"{statistic}/{one}", null, 2 * error, 2_458)
            q_value = np.minimum(1, rng.exponential(0.06, size))
            rows.add(name, layer, f"{statistic}/q_value", q_value, np.nan, 60)
        for place in range(5):
            low = 2**place * 16 - 15
            high = 2**place * 16
            rows.add(name, layer, f"entropy/visible_keys_{low}_{high}", 1 + 0.5 * place + rng.random(size), 0.05, 900)
        for low in range(0, 256, 32):
            mean = 1.5 + 0.003 * low + 0.2 * rng.random(size)
            rows.add(name, layer, f"selective_log_partition/position_{low}_{low + 31}", mean, 0.04, 3072)
    return rows.table()


def layer_rows(sublayers: list[dict], rng: np.random.Generator) -> polars.DataFrame:
    rows = Rows()
    state = {"pairwise_distance": 7.5, "log_determinant": -1.4, "effective_rank": 120.0}
    growth = {"attention": 0.18, "feed_forward": 0.12, "norm": -0.16, "attention_and_feed_forward": 0.2}
    for sublayer in sublayers:
        name = sublayer["name"]
        layer = sublayer["layer"]
        move = growth[sublayer["kind"]] + 0.05 * rng.standard_normal()
        after = {"pairwise_distance": state["pairwise_distance"] * np.exp(move),
                 "log_determinant": state["log_determinant"] + 1.6 * move,
                 "effective_rank": state["effective_rank"] - 9 * abs(move) - 1.5}  # fmt: skip
        for statistic, before in state.items():
            change = f"{statistic}_log_ratio" if statistic == "pairwise_distance" else f"{statistic}_change"
            moved = move if statistic == "pairwise_distance" else after[statistic] - before
            rows.add(name, layer, f"{statistic}/before", before, 0.01 * abs(before), 60, heads=False)
            rows.add(name, layer, f"{statistic}/after", after[statistic], 0.01 * abs(before), 60, heads=False)
            rows.add(name, layer, change, moved, 0.02 * (1 + abs(moved)), 60, heads=False)
            null = growth[sublayer["kind"]] * 0.4 + 0.02 * rng.standard_normal()
            rows.add(name, layer, f"{change}/reinitialised", null, 0.03, 12, heads=False)
        state = after
    return rows.table()


def example(sites: list[dict], streams: dict[str, list[str]], rng: np.random.Generator, title: str) -> dict:
    drawn: dict[str, Any] = {"title": title, "tokens": streams, "sites": {}}
    for site in sites:
        queries = len(streams[site["query_tokens"]])
        keys = len(streams[site["key_tokens"]])
        shape = (site["heads"], queries)
        weights = -np.sort(-rng.dirichlet(np.ones(8), shape)[..., : min(5, keys)], axis=-1)
        drawn["sites"][str(site["index"])] = {
            "selective_log_partition": np.round(np.abs(rng.normal(1.6, 0.9, shape)), 3).tolist(),
            "entropy": np.round(np.abs(rng.normal(2.5, 0.7, shape)), 3).tolist(),
            "top_keys": rng.permuted(np.tile(np.arange(keys), (*shape, 1)), axis=-1)[..., : min(5, keys)].tolist(),
            "top_weights": np.round(weights, 4).tolist(),
        }
    return drawn


def details_of(sites: list[dict], rng: np.random.Generator, streams: dict[str, list[str]], examples: int = 2) -> dict:
    histograms = {}
    for statistic, low, high in (("selective_log_partition", 0.0, 6.0), ("entropy_fraction", 0.0, 1.0)):
        edges = np.linspace(low, high, 31)
        middle = (edges[:-1] + edges[1:]) / 2
        counts = {}
        for site in sites:
            peak = rng.uniform(0.2, 0.8, (site["heads"], 1)) * high
            counts[str(site["index"])] = (
                np.round(900 * np.exp(-0.5 * ((middle - peak) / (0.12 * high)) ** 2)).astype(int).tolist()
            )
        histograms[statistic] = {"edges": edges.round(4).tolist(), "counts": counts}
    drawn = [example(sites, streams, rng, f"window {12 + 17 * place}") for place in range(examples)]
    return {"histograms": histograms, "examples": drawn}


def findings() -> list[dict]:
    return [
        {
            "id": "sink", "title": "Heads mostly on the first token", "value": 0.71, "standard_error": 0.012,
            "sentence": "9 of 72 heads put more than half of their weight on the first token; "
            "their first value is 0.42 times as long as the mean value.",
            "unit": "weight", "control": "0.11 in a re-initialised copy of the model", "count": 24_576,
            "caveat": "That the head does nothing: it is a candidate no-op. Weight is not information.",
            "statistic": "weight_first", "heads": [[1, 3], [2, 5], [4, 11]],
        },
        {
            "id": "sharpness", "title": "Sharpest and flattest heads", "value": 4.31, "standard_error": 0.05,
            "sentence": "Layer 2, head 5 is sharpest: selective log Z 4.31 nats, largest score 9.8 above the mean; "
            "layer 0, head 7 is flattest at 0.12.",
            "unit": "nats", "control": "0.03 in a re-initialised copy of the model", "count": 24_576,
            "caveat": "That sharp heads matter more. Sharpness is a property of the weights on this text.",
            "statistic": "selective_log_partition", "heads": [[2, 5], [0, 7]],
        },
        {
            "id": "climb", "title": "Writes that sharpen or flatten", "value": 0.83, "standard_error": 0.009,
            "sentence": "14 heads sharpen and 22 flatten their own attention more than mismatched heads would.",
            "unit": "share of queries", "control": "0.52 with the writes of mismatched heads", "count": 2_458,
            "caveat": "That the model performs ascent on an energy. Keys are frozen; no equilibrium is claimed.",
            "statistic": "own_write_sharpens", "heads": [[3, 1], [5, 9]],
        },
        {
            "id": "collapse", "title": "Where volume falls most", "value": -0.31, "standard_error": 0.02,
            "sentence": "Volume falls most in encoder.layer.3 feed-forward norm.", "unit": "nats per direction",
            "control": "−0.06 in a re-initialised copy of the model", "count": 60,
            "caveat": "That information is lost: a map can shrink volume and stay invertible.",
            "statistic": "log_determinant_change", "heads": [],
        },
    ]  # fmt: skip


def run_of(sites: list[dict], sublayers: list[dict], name: str = "all-MiniLM-L6-v2") -> dict:
    return {
        "schema_version": 1, "massieu_version": "0.1.0", "date": "2026-07-03T09:12:44Z", "complete": True,
        "model": {"name": name, "architecture": "BertModel", "hash": "b3f1c9a04d7e5512", "revision": None,
                  "parameters": 22_713_216, "dtype": "float32", "device": "cpu", "layers": 6, "heads": 12,
                  "hidden_size": 384},
        "text": {"source": "pydoc_data.topics", "documents": 78, "tokens": 168_960, "windows": 660, "max_length": 256,
                 "packing": True, "dropped": "71 tokens at the end of the text did not fill a window."},
        "error_unit": {"unit": "block of 11 consecutive windows", "count": 60, "degrees": 26},
        "self_check": {"error": 3.1e-7, "tolerance": 1e-4, "site": sites[0]["name"], "passed": True},
        "capture": {"route": "attention function registered with transformers; the output stays the model's own",
                    "attention_sites": len(sites), "unexplained_keywords": []},
        "sites": sites, "sublayers": sublayers,
        "settings": {"batch_size": 8, "max_length": 256, "statistics": None, "query_sample": 64}, "seed": 0,
        "versions": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.4.1",
                     "massieu": "0.1.0"},
        "timing": {"forward": 41.2, "moments": 18.4, "replay": 6.1}, "sample": {"windows": 66, "queries": 4_224},
        "statistics": catalogue.statistics(), "findings": findings(), "nonfinite": [],
        "warnings": ["The tokenizer's maximum length is 512; windows of 256 were used."],
    }  # fmt: skip


def encoder(layers: int = 6, heads: int = 12, tokens: int = 0, examples: int = 2, seed: int = 0) -> Results:
    """A post-norm encoder; the default has MiniLM's 6 × 12 heads."""
    rng = np.random.default_rng(seed)
    sites = self_attention_sites(layers, heads)
    sublayers = post_norm_sublayers(layers)
    words = (WORDS * (1 + tokens // len(WORDS)))[: tokens or len(WORDS)]
    details = details_of(sites, rng, {"text": words}, examples)
    return Results(run_of(sites, sublayers), details, head_rows(sites, rng), layer_rows(sublayers, rng))


def large() -> Results:
    """32 × 32 heads with examples of 256 tokens: far more than a page may carry uncompressed."""
    return encoder(layers=32, heads=32, tokens=256, examples=1)


def encoder_decoder(layers: int = 3, heads: int = 4, seed: int = 1) -> Results:
    """Several attention sites per layer; cross-attention's keys are another text."""
    rng = np.random.default_rng(seed)
    encoder_kinds = [("encoder", "self_attn", "self", "source", "source")]
    decoder_kinds = [
        ("decoder", "self_attn", "causal", "target", "target"),
        ("decoder", "encoder_attn", "cross", "target", "source"),
    ]
    rows = [(layer, kind) for kinds in (encoder_kinds, decoder_kinds) for layer in range(layers) for kind in kinds]
    sites: list[dict[str, Any]] = [
        {"index": index, "name": f"{stack}.block.{layer}.{module}", "layer": layer, "kind": kind, "heads": heads,
         "key_heads": heads, "head_size": 16, "query_tokens": queries, "key_tokens": keys, "unavailable": {}}
        for index, (layer, (stack, module, kind, queries, keys)) in enumerate(rows)
    ]  # fmt: skip
    sites[-1]["unavailable"] = {"own_write_sharpens": "the keys of a cross-attention do not depend on the write"}
    sublayers = post_norm_sublayers(layers, "encoder.block") + post_norm_sublayers(layers, "decoder.block")
    for index, sublayer in enumerate(sublayers):
        sublayer["index"] = index
    streams = {"source": ["▁Das", "▁Haus", "▁ist", "▁wunder", "bar", ".", "</s>"],
               "target": ["<pad>", "▁The", "▁house", "▁is", "▁wonderful", "."]}  # fmt: skip
    run = run_of(sites, sublayers, "t5-tiny")
    return Results(run, details_of(sites, rng, streams), head_rows(sites, rng), layer_rows(sublayers, rng))


def bare() -> Results:
    """Almost nothing was measured: an interrupted run, one head, one statistic, no control, a null value."""
    sites = self_attention_sites(1, 1)
    rows = Rows()
    rows.add(sites[0]["name"], 0, "entropy", [float("nan")], float("nan"), 0)
    run = run_of(sites, []) | {"complete": False, "findings": [], "self_check": None, "sample": None, "timing": None}
    run |= {"error_unit": None, "text": None, "versions": {}, "settings": {}, "statistics": [], "seed": None}
    run["model"] = dict.fromkeys(run["model"])
    return Results(run, {"histograms": {}, "examples": []}, rows.table(), empty_table())


def hostile() -> Results:
    """Every string that a user can influence tries to break out of the page."""
    results = copy.deepcopy(encoder(layers=2, heads=2))
    run = results.run
    details = results.details
    attack = HOSTILE[0] + HOSTILE[1]
    run["model"] |= {"name": attack, "hash": attack, "architecture": attack}
    run["text"] |= {"source": attack, "dropped": attack}
    run["warnings"] = [f"{attack} {place}" for place in range(300)]
    run["nonfinite"] = [{"site": attack, "layer": 0, "head": 1, "count": 3}]
    run["settings"] = {attack: attack}
    for place, finding in enumerate(run["findings"]):
        finding |= {"sentence": attack, "title": attack, "control": attack, "caveat": attack, "unit": HOSTILE[place]}
    run["statistics"][0] |= {"title": attack, "formula": attack, "question": attack, "group": attack, "unit": attack}
    old = run["sites"][0]["name"]
    new = attack
    run["sites"][0] |= {"name": new, "kind": attack, "unavailable": {attack: attack}}
    run["sublayers"][0]["kind"] = attack
    for drawn in details["examples"]:
        drawn["title"] = attack
        drawn["tokens"]["text"] = HOSTILE + drawn["tokens"]["text"][len(HOSTILE) :]
    patches = details["examples"][1]  # no text, as for an image; and a first query that sees one key only
    patches["tokens"] = {}
    for entry in patches["sites"].values():
        for name in ("top_keys", "top_weights"):
            entry[name] = [[row[:1] if place == 0 else row for place, row in enumerate(head)] for head in entry[name]]
    heads = results.heads.with_columns(polars.col("site").replace({old: new}))
    return Results(run, details, heads, results.layers)
