"""Files of an inductor engine, relative to its artifact."""

from __future__ import annotations

PACKAGE_DIRECTORY = "package"
"""An unpacked AOTInductor package."""
CONSTANTS_FILE = "constants.safetensors"
"""Computed buffers of the model that no checkpoint holds, by the engine's name for them."""
