// A mover by Hopper's bulk copy engine, to compare designs: one warp walks a list, each lane copies a row of K and one of V through
// shared memory, and the loads of the next STAGES - 1 tiles are in flight while a tile is stored. Rows are copied whole by the engine:
// no registers, no addresses but one a row. Ordered lists are safe for the same reason as in move.py: a tile is stored only after
// its loads have arrived, and a store clobbers sources of its own or earlier tiles only.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kLanes = 32;
constexpr int kStages = 3;

__device__ uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ void load(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ void store(uint8_t* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ void await(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra waiting;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Grid: lists, head fastest, then requests, then layers. src and dst: cells of a request's list, [batch, capacity].
__global__ void walk(const int64_t* pools, const int32_t* src, const int32_t* dst, const int32_t* spans, int requests, int heads,
                     int capacity, int page_size, int row_bytes, int64_t page_stride, int64_t kv_stride, int64_t head_stride,
                     int64_t token_stride) {
  extern __shared__ __align__(128) uint8_t buffer[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  const int lane = threadIdx.x;
  const int head = blockIdx.x % heads, request = blockIdx.x / heads % requests, layer = blockIdx.x / heads / requests;
  uint8_t* keys = reinterpret_cast<uint8_t*>(pools[layer]) + head * head_stride;
  const int begin = spans[request * 3], end = spans[request * 3 + 1];
  const int tiles = (end - begin + kLanes - 1) / kLanes;
  src += static_cast<int64_t>(request) * capacity;
  dst += static_cast<int64_t>(request) * capacity;
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[stage])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();

  const auto place = [&](int cell) { return cell / page_size * page_stride + cell % page_size * token_stride; };
  const auto slot = [&](int tile) { return shared_address(buffer) + ((tile % kStages) * kLanes + lane) * 2 * row_bytes; };
  const auto fetch = [&](int tile) {
    const int move = begin + tile * kLanes + lane;
    const int rows = min(kLanes, end - begin - tile * kLanes);
    const uint32_t barrier = shared_address(&barriers[tile % kStages]);
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(rows * 2 * row_bytes) : "memory");
    }
    __syncwarp();
    if (lane < rows) {
      const uint8_t* from = keys + place(src[move]);
      load(slot(tile), from, row_bytes, barrier);
      load(slot(tile) + row_bytes, from + kv_stride, row_bytes, barrier);
    }
  };

  for (int tile = 0; tile < min(tiles, kStages - 1); ++tile) fetch(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + kStages - 1 < tiles) {
      // The stage was stored from in the last turn; its bytes must have left before others arrive there.
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      __syncwarp();
      fetch(tile + kStages - 1);
    }
    await(shared_address(&barriers[tile % kStages]), tile / kStages % 2);
    const int move = begin + tile * kLanes + lane;
    if (move < end) {
      uint8_t* to = keys + place(dst[move]);
      store(to, slot(tile), row_bytes);
      store(to + kv_stride, slot(tile) + row_bytes, row_bytes);
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace

extern "C" int bulk_walk(const int64_t* pools, const int32_t* src, const int32_t* dst, const int32_t* spans, int layers, int requests,
                         int heads, int capacity, int page_size, int row_bytes, int64_t page_stride, int64_t kv_stride,
                         int64_t head_stride, int64_t token_stride, cudaStream_t stream) {
  const int bytes = kStages * kLanes * 2 * row_bytes;
  cudaFuncSetAttribute(walk, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  walk<<<layers * requests * heads, kLanes, bytes, stream>>>(pools, src, dst, spans, requests, heads, capacity, page_size, row_bytes,
                                                             page_stride, kv_stride, head_stride, token_stride);
  return cudaGetLastError();
}
