"""Plots of a GPU benchmark's figures, as PNG beside its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot


def plot_decode(figures: dict[str, Any], out: Path) -> str:
    """Tokens a second against the batch: the engine, transformers where it was measured, and the roofline."""
    figure, axes = pyplot.subplots(figsize=(6, 4))
    batches = [int(batch) for batch in figures["decode"]]
    rates = [row["tokens_per_s"] for row in figures["decode"].values()]
    axes.plot(batches, rates, "o-", label="engine")
    axes.plot(
        batches, [r / row["of_roofline"] for r, row in zip(rates, figures["decode"].values(), strict=True)], "--", label="roofline"
    )
    baseline = figures.get("transformers_ms", {})
    if baseline and "failed" not in baseline:
        known = sorted(map(int, baseline))
        axes.plot(known, [batch / baseline[str(batch)] * 1e3 for batch in known], "s-", label="transformers, torch.compile")
    axes.set(xlabel="batch", ylabel="tokens a second", title="decode, 2,048 tokens of context")
    axes.legend()
    return _save(figure, out, "decode")


def plot_pages(figures: dict[str, Any], out: Path) -> str:
    """KV pages in use over time, with and without rounds, at equal batch."""
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, label in (("dense_pages", "dense"), ("compacted_equal_pages", "with rounds")):
        times, pages = zip(*figures[name], strict=True)
        axes.plot(times, pages, label=label)
    axes.set(xlabel="seconds", ylabel="KV pages in use", title="32 streams, prompts of 2,048, 512 tokens each")
    axes.legend()
    return _save(figure, out, "pages")


def _save(figure: Any, out: Path, name: str) -> str:
    path = out.with_name(f"{out.stem}_{name}.png")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path.name
