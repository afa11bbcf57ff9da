"""report.html: one file with everything in it, to be opened from a disk or sent by mail."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from dreamer_jax.analysis.drawing import DARK, Figure
from dreamer_jax.analysis.summary import Summary

STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --background: #ffffff; --line: #d0d0d0; --quiet: #5a5a5a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8e8; --background: #16181c; --line: #3c414a; --quiet: #a9afb8; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--background);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem 1rem .25rem 0; vertical-align: top; }
tr { border-bottom: 1px solid var(--line); } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1rem 0; overflow-x: auto; } img { max-width: 100%; height: auto; }
p.quiet { color: var(--quiet); }
@media print { section { break-inside: avoid; } }
"""


def write_report(summary: Summary, figures: list[Figure]) -> str:
    """The page as HTML, see `page`.

    Args:
        summary: of the model; `run`, `step` and `sequences` beside what `summarise` gives.
        figures: see `make_figures`.
    """
    model = summary["model"]
    about = (
        f"{summary['run']}, checkpoint {summary['step']:,}: {summary['sequences']:,} sequences of {summary['data']}, "
        f"{summary['tokens']:,} tokens. Depths are counted from 0."
    )
    table = numbers(summary)
    paper = "The paper's DR+DA, depth 32" if any(said for _, _, said in table) else ""
    overlap = "An expert that needs two depths counts as both specialised and generalised in a model this shallow."
    note = overlap if "generalised" in summary.get("experts", {}) and model["depth"] < 10 else ""
    title = f"What {model['variant']} of depth {model['depth']} does"
    return page(title, about, [("Measure", "Here", paper), *table], figures, note)


def page(title: str, about: str, table: Sequence[Sequence[str]], figures: list[Figure], note: str = "") -> str:
    """A report as HTML: no script, no request, figures in it as SVG for a light and for a dark screen.

    Args:
        title: of the page.
        about: what it is about, in small print.
        table: its first row is the heading; what stands behind the first column is numbers, or what is said of them.
        figures: with what is said of each.
        note: below the table, in small print.
    """
    head, *rows = ([html.escape(cell) for cell in row] for row in table)

    def line(cells: Sequence[str]) -> str:
        label, value, *more = cells
        return f"<tr><td>{label}</td><td class=number>{value}</td>{''.join(f'<td>{its}</td>' for its in more)}</tr>"

    heading = "".join(f"<th>{cell}</th>" for cell in head)
    lines, sections = "\n".join(map(line, rows)), "\n".join(map(_section, figures))
    small = f'<p class="quiet">{html.escape(note)}</p>' if note else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="quiet">{html.escape(about)}</p>
<table>
<tr>{heading}</tr>
{lines}
</table>
{small}
{sections}
</body>
</html>
"""


def numbers(summary: Summary) -> list[tuple[str, str, str]]:
    """(measure, value, what the paper has) of the numbers in the text of section 4.2, and of the logit lens."""
    depth = summary["model"]["depth"]
    table = _expert_numbers(summary, depth) if "experts" in summary else []
    lens = summary["lens"]
    if lens["targets"]:
        table.append((f"{summary['model']['predicts']} right after the last depth", f"{lens['accuracy'][-1]:.1%}", ""))
        best = max(lens["accuracy"])
        early = next((l for l, value in enumerate(lens["accuracy"]) if value >= 0.9 * best), depth - 1)
        table.append(("first depth with 90 % of the best depth's accuracy", f"{early} of 0–{depth - 1}", ""))
    if "hops" in summary:
        frontier = ", ".join(map(str, summary["hops"]["frontier"]))
        table.append(("edges from the source that its news has come after each step", frontier, ""))
    if "slots" in summary:
        having = [l for l, its in enumerate(summary["slots"]["most"]) if its]
        for l in dict.fromkeys(having[i] for i in (0, len(having) // 2, -1)):
            its = summary["slots"]["most"][l][0]
            name = f'text "{_short(its["text"])}"' if "text" in its else f"slot {its['slot']}"
            table.append(
                (f"read most at depth {l}, of {summary['slots']['count']}: {name}", f"{its['weight']:.1%}", "")
            )
    return table + _convergence_numbers(summary, depth)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _convergence_numbers(summary: Summary, depth: int) -> list[tuple[str, str, str]]:
    table = []
    if "convergence" in summary:
        settled, threshold = summary["convergence"]["settled"], summary["convergence"]["threshold"]
        share = sum(settled[:-1]) / max(1, sum(settled))
        table.append((f"tokens that settle (changes below {threshold}) before step {depth}", f"{share:.1%}", ""))
    if "trajectories" in summary:
        kinds = [token["kind"] for token in summary["trajectories"]["tokens"]]
        for kind in dict.fromkeys(kinds):
            label = f"chosen tokens whose path is called {kind}, at depth {summary['trajectories']['depth']}"
            table.append((label, f"{kinds.count(kind)} of {len(kinds)}", ""))
    return table


def _expert_numbers(summary: Summary, depth: int) -> list[tuple[str, str, str]]:
    experts = summary["experts"]
    table = [("Gini coefficient of all experts", f"{experts['global_gini']:.3f}", "about 0.075")]
    used = _range([value / experts["experts"] for value in experts["used"]], "{:.1%}")
    table.append(("experts used at a depth, of all", used, ""))
    busiest = _range([value / experts["experts"] for value in experts["used_for_90_percent"]], "{:.1%}")
    table.append(("experts that take 90 % of a depth's routings, of all", busiest, ""))
    if "against_la" in experts:
        table += [
            (
                f"experts used at a depth, against the 1/{depth} of LA",
                _range(experts["against_la"], "{:.1f}×"),
                "2–11×",
            ),
            (
                f"the same for 90 % of the routings, against 0.9/{depth}",
                _range(experts["against_la_90_percent"], "{:.1f}×"),
                "",
            ),
            ("experts with 90 % of their use at one or two depths", f"{experts['specialised']:.1%}", ""),
            ("the same, of depths in the deeper half", f"{experts['specialised_deep']:.1%}", "about 22 %"),
            ("experts that need more than 20 % of the depths", f"{experts['generalised']:.1%}", "about 50 %"),
            ("experts never used", f"{experts['unused']:.1%}", "none"),
        ]
    if "against_layered" in summary:
        label = f"a layer of {summary['compared_with']}"
        used, busiest = (_range(summary[f"against_layered{of}"], "{:.1f}×") for of in ("", "_90_percent"))
        table.append((f"experts used at a depth, against {label}", used, "2–11×"))
        table.append((f"experts that take 90 %, against {label}", busiest, ""))
    return table


def _range(values: list[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} – {high}"


def _section(figure: Figure) -> str:
    light, dark = (
        "data:image/svg+xml;base64," + base64.b64encode(data).decode()
        for data in (figure.svg, figure.render("svg", DARK))
    )
    name, width = html.escape(figure.title), round(figure.size[0] * 100)
    return f"""<section>
<h2>{name}</h2>
<p>{html.escape(figure.text)}</p>
<figure><picture>
<source srcset="{dark}" media="(prefers-color-scheme: dark)">
<img src="{light}" alt="{name}" width="{width}">
</picture></figure>
</section>"""
