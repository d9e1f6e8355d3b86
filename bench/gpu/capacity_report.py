"""The tables of docs/results/many-sequences/README.md, from the records beside it."""

from __future__ import annotations

from capacity_points import MEMORIES, WAYS, Curve, arrivals_by_way, machine, name_of, panels
from records import Record

GIB = 1 << 30


def _table(head: list[str], rows: list[list[str]], left: int = 1) -> list[str]:
    """A table. left: how many columns are aligned to the left."""
    aligned = ["---"] * left + ["---:"] * (len(head) - left)
    return [f"| {' | '.join(cells)} |" for cells in (head, aligned, *rows)]


def _ran_on(records: list[Record]) -> str:
    told = machine(records)
    scaled = "; ".join(sorted({record["scaled"] for record in records}))
    least, most = (f(record["weights_ms"] for record in records) for f in (min, max))
    return (
        f"{told['gpu']}, {told['dates']}, commit {told['commits']}. Scaled: {scaled}, "
        f"{least:.2f} to {most:.2f}."
    )


def _error(record: Record) -> str:
    if record["error_median"] is None:
        return "not measured"
    return f"{record['error_median']:.3f} / {record['error_max']:.3f}"


def _full_row(curve: Curve) -> list[str]:
    """A curve's last point."""
    if not curve.points:
        return [curve.name, curve.end, *[""] * 7]
    last = curve.points[-1]
    count, each = last["sequences"], last["tokens_per_s"] / last["sequences"]
    limit = MEMORIES[curve.limit] if curve.full else f"{curve.most} would fit"
    return [
        curve.name,
        f"{count}, {limit}",
        f"{last['layer_us']:,.0f}",
        f"{last['tokens_per_s']:,.0f}",
        f"{each:.1f}",
        f"{last['host_bytes'] / GIB:,.0f}" if last["host_bytes"] else "none",
        f"{(last['gpu_bytes'] + last['workspace_bytes']) / GIB:,.0f}",
        f"{last['moved_rows']:,}",
        _error(last),
    ]


FULL_HEAD = [
    "",
    "sequences, limited by",
    "us a layer",
    "tokens/s",
    "of each",
    "host, GiB",
    "GPU, GiB",
    "rows over the link",
    "error, median / largest",
]


def _by_count(curves: list[Curve]) -> list[str]:
    """Tokens a second of each count that fits."""
    counts = sorted({point["sequences"] for curve in curves for point in curve.points})
    rows = []
    for curve in curves:
        found = {point["sequences"]: f"{point['tokens_per_s']:,.0f}" for point in curve.points}
        rows.append([curve.name, *(found.get(count, "") for count in counts)])
    return _table(["tokens/s by sequences", *map(str, counts)], rows)


def capacity_section(records: list[Record], host_gib: int) -> list[str]:
    """Two tables for each length and link."""
    measured = [record for record in records if "way" in record and "skipped" not in record]
    made = [_ran_on(measured), ""]
    for title, curves in panels(records, host_gib).items():
        made += [f"### {title}", ""]
        made += [*_table(FULL_HEAD, [_full_row(curve) for curve in curves], 2), ""]
        made += [*_by_count(curves), ""]
    return made


def arrivals_section(records: list[Record]) -> list[str]:
    """A table of the percentiles."""
    rows = []
    for of_way in arrivals_by_way(records).values():
        for record in of_way:
            token, wait = record["token_ms"], record["wait_s"]
            rows.append(
                [
                    f"{name_of(of_way)}, {record['slots']} at most",
                    f"{record['requests_per_s']:.2f}",
                    f"{record['share']:.0%}",
                    *(f"{token[p]:.0f}" for p in ("p50", "p90", "p99")),
                    *(f"{wait[p]:.2f}" for p in ("p50", "p90", "p99")),
                    f"{record['sequences_mean']:.1f}",
                ]
            )
    head = ["", "requests/s", "of its capacity", "token, ms: p50", "p90", "p99"]
    head += ["wait, s: p50", "p90", "p99", "sequences, mean"]
    live = [record for record in records if "open_ms" in record]
    opened = [
        f"{WAY}: {min(ms):.1f} to {max(ms):.1f} ms"
        for WAY in sorted({record["way"] for record in live})
        for ms in [[record["open_ms"] for record in live if record["way"] == WAY]]
    ]
    told = (
        ["", f"To open a decoder took, median of each run, {'; '.join(opened)}."] if opened else []
    )
    return [_ran_on(records), "", *_table(head, rows), *told, ""]


def whole_section(records: list[Record]) -> list[str]:
    """A table of the whole steps (whole_step.py)."""
    rows = [
        [
            WAYS[record["way"]][0],
            str(record["sequences"]),
            f"{record['step_ms']:.1f}",
            f"{record['tokens_per_s']:,.0f}",
            f"{record['host_bytes'] / GIB:,.0f}" if record["host_bytes"] else "none",
            f"{record['gpu_used_bytes'] / GIB:,.0f}",
            _error(record),
        ]
        for way in WAYS
        for record in records
        if record["way"] == way and "skipped" not in record
    ]
    head = ["", "sequences", "ms a step", "tokens/s", "host, GiB", "GPU, GiB", FULL_HEAD[-1]]
    told = machine(records)
    ran = f"{told['gpu']}, {told['dates']}, commit {told['commits']}."
    return [ran, "", *_table(head, rows), ""]


def filled(
    page: str,
    capacity: list[Record],
    arrivals: list[Record],
    whole: list[Record],
    host_gib: int,
) -> str:
    """The page with new tables between its marks.

    Raises:
        ValueError: A mark is missing.
    """
    page = _between(page, "capacity", capacity_section(capacity, host_gib))
    if arrivals:
        page = _between(page, "arrivals", arrivals_section(arrivals))
    return _between(page, "whole", whole_section(whole)) if whole else page


def _between(page: str, name: str, text: list[str]) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    for mark in (begin.strip(), end):
        if page.count(mark) != 1:
            raise ValueError(f"the page has {mark!r} {page.count(mark)} times, not once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n" + "\n".join(text) + f"\n{end}{rest.split(end)[1]}"
