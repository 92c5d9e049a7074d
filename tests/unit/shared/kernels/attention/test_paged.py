"""The checked wrappers: what they pass on and the words with which they refuse."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.attention import paged, reference
from tests.support.attention.cases import TOLERANCE, Case, make
from tests.unit.shared.kernels.attention.test_cpu import REFUSED, bits
