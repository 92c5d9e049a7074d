"""What both services say of engines, as messages: the words of manifests beside the numbers of the wire."""

from __future__ import annotations

from shared.kv_spec import Layout
from shared.pb.quire.v1 import common_pb2
from shared.profiles import OptimizationProfile, Range

BACKENDS = {
    "inductor": common_pb2.BACKEND_INDUCTOR,
    "tensorrt_rtx": common_pb2.BACKEND_TENSORRT_RTX,
    "tensorrt": common_pb2.BACKEND_TENSORRT,
}
LAYOUTS = {Layout.PAGED: common_pb2.KV_LAYOUT_PAGED, Layout.LINEAR: common_pb2.KV_LAYOUT_LINEAR}
DTYPES = {
    "float32": common_pb2.ELEMENT_TYPE_FLOAT32,
    "bfloat16": common_pb2.ELEMENT_TYPE_BFLOAT16,
    "float16": common_pb2.ELEMENT_TYPE_FLOAT16,
}
"""Element types that engines are built for: of weights, and of caches."""


def profile_message(profile: OptimizationProfile) -> common_pb2.OptimizationProfile:
    return common_pb2.OptimizationProfile(name=profile.name, batch=_sizes(profile.batch), query_len=_sizes(profile.query_len))


def _sizes(sizes: Range) -> common_pb2.SizeRange:
    return common_pb2.SizeRange(min=sizes.min, opt=sizes.opt, max=sizes.max)
