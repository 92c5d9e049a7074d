"""Plots of a GPU benchmark's figures, as PNG beside its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _new_plot() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # the extra `bench`: figures need no display, and no plots no matplotlib

    figure = Figure(figsize=(6, 4))
    return figure, figure.subplots()


def plot_decode(figures: dict[str, Any], out: Path) -> str:
    """Tokens a second against the batch: the engine, transformers where it was measured, and the roofline."""
    figure, axes = _new_plot()
    rows = sorted((int(batch), row) for batch, row in figures["decode"].items())
    batches = [batch for batch, _ in rows]
    axes.plot(batches, [row["tokens_per_s"] for _, row in rows], "o-", label="engine")
    axes.plot(batches, [row["tokens_per_s"] / row["of_roofline"] for _, row in rows], "--", label="roofline")
    baseline = figures.get("transformers_ms", {})
    if baseline and "failed" not in baseline:
        known = sorted(map(int, baseline))
        axes.plot(known, [batch / baseline[str(batch)] * 1e3 for batch in known], "s-", label="transformers, torch.compile")
    axes.set(xlabel="batch", ylabel="tokens a second", title="decode, 2,048 tokens of context")
    axes.legend()
    return _save(figure, out, "decode")


def plot_pages(figures: dict[str, Any], out: Path) -> str:
    """KV pages in use over time, with and without rounds, at equal batch."""
    figure, axes = _new_plot()
    for name, label in (("dense_pages", "dense"), ("compacted_equal_pages", "with rounds")):
        times, pages = zip(*figures[name], strict=True)
        axes.plot(times, pages, label=label)
    axes.set(xlabel="seconds", ylabel="KV pages in use", title="KV pages of 32 streams, 512 tokens of prompt each")
    axes.legend()
    return _save(figure, out, "pages")


def _save(figure: Any, out: Path, name: str) -> str:
    path = out.with_name(f"{out.stem}_{name}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path.name
