# SPDX-License-Identifier: Apache-2.0
"""The two pictures of the README, as SVG: the checkpoints of a run that a policy kept, and how long saves take.

`python -m tools.pictures` writes them anew. The first is the answer of `ckptmgr.plan` for a run whose losses are
computed here; the figures of the second are read from the table of saves in `docs/benchmarks.md`.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from xml.sax.saxutils import escape

from ckptmgr import Checkpoint, parse_policy, plan

ROOT = Path(__file__).parent.parent
KEEP = "last(3) | best(2, loss, min) | every(1000)"
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px; fill: #57606a }
.ours { fill: #0969da } .other { fill: #afb8c1 } .line { stroke: #afb8c1; stroke-width: 1.5; fill: none }
.disk { stroke: #bc4c00; stroke-width: 1.5; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 }
.ours { fill: #4493f8 } .other { fill: #59636e } .line { stroke: #59636e }
.disk { stroke: #f0883e }
}
</style>"""


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{name} text-anchor="{anchor}">{escape(text)}</text>'


def _loss(step: int) -> float:
    """Return the loss of a run that gets worse again at its end."""
    return 1.2 * math.exp(-step / 700) + 0.25 + 0.1 * math.sin(step / 170) + (step / 3400) ** 4 / 2


def timeline() -> str:
    """Return the picture of a run of 3,400 steps, of which `KEEP` keeps some checkpoints."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    history = [
        Checkpoint(
            path=Path(f"net-{step}.ckpt"), series="net", step=step, sequence=number,
            saved_at=begun + timedelta(minutes=number), size_bytes=1, metrics={"loss": _loss(step)},
        )
        for number, step in enumerate(range(100, 3401, 100), 1)
    ]  # fmt: skip
    decided = plan(history, parse_policy(KEEP), begun + timedelta(hours=1))
    kept = {one.step for one in decided.kept}
    xs = {one.step: 30 + one.step * 700 / 3400 for one in history}
    ys = {one.step: 150 - (_loss(one.step) - 0.2) * 90 for one in history}
    curve = " ".join(f"{xs[step]:.1f},{ys[step]:.1f}" for step in xs)
    parts = [f'<polyline class="line" points="{curve}"/>']
    parts += [
        f'<circle class="{"ours" if step in kept else "other"}" cx="{xs[step]:.1f}" '
        f'cy="{ys[step]:.1f}" r="{6 if step in kept else 3.5}"/>'
        for step in xs
    ]
    parts += [_text(xs[step], 190, f"{step:,}", kind="small", anchor="middle") for step in kept
              if step % 1000 == 0 or step == max(xs)]  # fmt: skip
    parts += [
        _text(30, 22, f'keep="{KEEP}"'),
        _text(30, 212, f"loss by step: {len(history)} checkpoints, {len(kept)} kept (large)", kind="small"),
    ]  # fmt: skip
    return _svg(760, 224, f"Checkpoints that {KEEP} keeps of a run", parts)


def figures(page: str) -> tuple[float, list[tuple[str, float, float]]]:
    """Return the seconds of the bare disk, and mode, ours and MindSpore's of the table of saves."""
    begin = page.index("**Saves of 1 GiB**")
    text = page[begin : page.index("\n\nT1:", begin)]
    disk = re.search(r"raw loop took ([\d.]+) s", text)
    if disk is None:
        raise ValueError("docs/benchmarks.md: the table of saves does not name the raw loop's time")
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", text, re.MULTILINE)
    named = [(mode.replace("`", ""), float(ours), float(other)) for mode, ours, other in rows]
    return float(disk[1]), named


def speed(page: str) -> str:
    """Return the bars of durable saves."""
    disk, rows = figures(page)
    left, width = 190, 500
    scale = width / max(other for _, _, other in rows)
    parts = [_text(30, 22, "Durable save of 1 GiB, seconds: ckptmgr (blue), MindSpore (grey)")]
    for number, (mode, ours, other) in enumerate(rows):
        y = 40 + number * 34
        parts += [
            _text(left - 10, y + 17, mode, anchor="end"),
            f'<rect class="ours" x="{left}" y="{y}" width="{ours * scale:.1f}" height="12"/>',
            _text(left + ours * scale + 6, y + 11, f"{ours:.2f}", kind="small"),
            f'<rect class="other" x="{left}" y="{y + 13}" width="{other * scale:.1f}" height="12"/>',
            _text(left + other * scale + 6, y + 24, f"{other:.2f}", kind="small"),
        ]
    bottom = 40 + len(rows) * 34
    at = left + disk * scale
    parts += [
        f'<line class="disk" x1="{at:.1f}" y1="34" x2="{at:.1f}" y2="{bottom}"/>',
        _text(at, bottom + 14, f"the bare disk: {disk:.2f}", kind="small", anchor="middle"),
    ]
    return _svg(760, bottom + 24, "Seconds of a durable save of 1 GiB", parts)


def pictures() -> dict[Path, str]:
    """Return the path and the content of each picture."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    return {
        ROOT / "docs" / "pictures" / "timeline.svg": timeline(),
        ROOT / "docs" / "pictures" / "speed.svg": speed(page),
    }


def main() -> None:
    """Write the pictures."""
    for path, content in pictures().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
