// Compaction on the CPU, in place. The contract is in reference.py.
//
// Two phases. First every list of moves (one for each request and decision row) becomes a list of runs: byte offsets inside a
// (K or V, head) plane, neighbouring moves merged as long as both ends stay contiguous, so a run ends at a page border at the
// latest. Then every plane of every request and layer executes its list, front to back, in parallel with the others. Nothing
// is proportional to the pools.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

// Source of cells that become zeros.
constexpr int64_t kZero = -1;

struct Run {
  int64_t source;  // byte offset in the plane, or kZero
  int64_t destination;
  int64_t bytes;
};

// Appends moves in ordinals to a list of runs.
class RunList {
 public:
  RunList(const int32_t* table, int64_t max_pages, const at::Tensor& pool)
      : table_(table),
        ordinals_(max_pages * pool.size(3)),
        num_pages_(pool.size(0)),
        page_size_(pool.size(3)),
        row_bytes_(pool.size(4)),
        page_stride_(pool.stride(0)),
        token_stride_(pool.stride(3)) {}

  void move(int64_t source, int64_t destination) {
    if (source == destination) return;
    const int64_t from = offset(source);
    const int64_t to = offset(destination);
    if (from >= 0 && to >= 0) append(from, to);
  }

  void zero(int64_t destination) {
    const int64_t to = offset(destination);
    if (to >= 0) append(kZero, to);
  }

  std::vector<Run> take() { return std::move(runs_); }

 private:
  // Byte offset of an ordinal's row, or -1 where the ordinal or its page does not exist.
  int64_t offset(int64_t ordinal) const {
    if (ordinal < 0 || ordinal >= ordinals_) return -1;
    const int64_t page = table_[ordinal / page_size_];
    if (page < 0 || page >= num_pages_) return -1;
    return page * page_stride_ + ordinal % page_size_ * token_stride_;
  }

  void append(int64_t from, int64_t to) {
    if (!runs_.empty()) {
      Run& last = runs_.back();
      const bool follows = from == kZero ? last.source == kZero : last.source != kZero && from == last.source + last.bytes;
      if (follows && to == last.destination + last.bytes) {
        last.bytes += row_bytes_;
        return;
      }
    }
    runs_.push_back({from, to, row_bytes_});
  }

  const int32_t* table_;
  int64_t ordinals_, num_pages_, page_size_, row_bytes_, page_stride_, token_stride_;
  std::vector<Run> runs_;
};

struct Request {
  int64_t keep, base, valid_len, tail;
};

// One past the last vacated cell of the page that holds the new end.
int64_t scrub_end(const Request& request, int64_t page_size) {
  const int64_t end = request.base + request.keep + request.tail;
  return std::min(request.valid_len + request.tail, (end + page_size - 1) / page_size * page_size);
}

// The tail behind the kept entries, then zeros up to `scrub_to`.
void finish(RunList& runs, const Request& request, int64_t scrub_to) {
  const int64_t end = request.base + request.keep;
  for (int64_t i = 0; i < request.tail; ++i) runs.move(request.valid_len + i, end + i);
  for (int64_t cell = end + request.tail; cell < scrub_to; ++cell) runs.zero(cell);
}

void fill_holes(RunList& runs, const Request& request, const int32_t* kept, int64_t scrub_to) {
  const int64_t end = request.base + request.keep;
  const int64_t staying = std::lower_bound(kept, kept + request.keep, end) - kept;
  int64_t hole = request.base;
  int64_t passed = 0;
  const auto next_hole = [&] {
    for (; passed < staying && kept[passed] == hole; ++passed) ++hole;
    return hole++;
  };
  // Survivors that lie where the tail or the zeros go leave first.
  const int64_t written_to = std::max(end + request.tail, scrub_to);
  int64_t next = staying;
  for (; next < request.keep && kept[next] < written_to; ++next) runs.move(kept[next], next_hole());
  finish(runs, request, scrub_to);
  for (; next < request.keep; ++next) runs.move(kept[next], next_hole());
}

// Rounds that move more than this many bytes leave the caches to others.
constexpr int64_t kStreamFrom = int64_t{64} << 20;
constexpr size_t kRunsAhead = 8;
constexpr int64_t kLine = 64;
constexpr int64_t kMostAhead = 8 * kLine;

void prefetch(const Run& run, const uint8_t* plane, bool stream) {
  const int64_t bytes = std::min(run.bytes, kMostAhead);
  for (int64_t i = 0; i < bytes && run.source != kZero; i += kLine) __builtin_prefetch(plane + run.source + i, 0);
  for (int64_t i = 0; i < bytes && !stream; i += kLine) __builtin_prefetch(plane + run.destination + i, 1);
}

void copy(const Run& run, uint8_t* plane, bool stream) {
  uint8_t* to = plane + run.destination;
  const uint8_t* from = plane + run.source;
#if defined(__AVX__)
  if (stream && run.bytes % kLine == 0 && reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    // Line by line, loaded before it is stored: safe on a run that overlaps itself, since within a page moves go downwards.
    for (int64_t i = 0; i < run.bytes; i += kLine) {
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + kLine / 2));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + kLine / 2), high);
    }
    return;
  }
#endif
  std::memmove(to, from, run.bytes);
}

void execute(const std::vector<Run>& runs, uint8_t* plane, bool stream) {
  for (size_t i = 0; i < runs.size(); ++i) {
    if (i + kRunsAhead < runs.size()) prefetch(runs[i + kRunsAhead], plane, stream);
    if (runs[i].source == kZero) {
      std::memset(plane + runs[i].destination, 0, runs[i].bytes);
    } else {
      copy(runs[i], plane, stream);
    }
  }
#if defined(__AVX__)
  if (stream) _mm_sfence();  // streamed stores are visible to other threads before this plane counts as done
#endif
}

void compact_group(
    at::TensorList pools, const at::Tensor& block_table, const at::Tensor& kept, const at::Tensor& move_offsets,
    const at::Tensor& target_tail, const at::Tensor& tail, const at::Tensor& base, const at::Tensor& valid_len,
    at::IntArrayRef first_row, int64_t head_step, int64_t list_layer_step, int64_t window, bool hole_filling, bool scrub,
    int64_t request_count) {
  const at::Tensor& pool = pools[0];
  const int64_t layers = static_cast<int64_t>(pools.size());
  const int64_t heads = pool.size(2);
  const int64_t page_size = pool.size(3);
  const int64_t list_rows = list_layer_step ? list_layer_step * layers : head_step ? heads : 1;

  const auto build = [&](int64_t request_index, int64_t list_row) -> std::vector<Run> {
    const int32_t* offsets = move_offsets.const_data_ptr<int32_t>() + request_index;
    const int64_t moves = offsets[1] - offsets[0];
    if (moves <= 0) return {};
    const auto at_request = [&](const at::Tensor& values) -> int64_t { return values.const_data_ptr<int32_t>()[request_index]; };
    const int64_t keep = std::clamp<int64_t>(moves - at_request(target_tail), 0, kept.size(2));
    const Request request{keep, at_request(base), at_request(valid_len), at_request(tail)};
    const int64_t scrub_to = scrub ? scrub_end(request, page_size) : 0;
    RunList runs(block_table.const_data_ptr<int32_t>() + request_index * block_table.stride(0), block_table.size(1), pool);
    if (window) {
      if (keep < window) return {};
      for (int64_t i = window; i > 0; --i) runs.move(request.valid_len - i, request.base + keep - i);
      finish(runs, request, scrub_to);
      return runs.take();
    }
    const int64_t row = list_layer_step ? first_row[list_row / heads] + list_row % heads : first_row[0] + list_row;
    const int32_t* ordinals = kept.const_data_ptr<int32_t>() + (request_index * kept.size(1) + row) * kept.size(2);
    if (hole_filling) {
      fill_holes(runs, request, ordinals, scrub_to);
    } else {
      for (int64_t i = 0; i < keep; ++i) runs.move(ordinals[i], request.base + i);
      finish(runs, request, scrub_to);
    }
    return runs.take();
  };

  std::vector<std::vector<Run>> lists(request_count * list_rows);
  at::parallel_for(0, static_cast<int64_t>(lists.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) lists[i] = build(i / list_rows, i % list_rows);
  });

  int64_t moved = 0;
  for (const auto& list : lists) {
    for (const Run& run : list) moved += run.bytes;
  }
  const bool stream = moved * 2 * heads * layers / list_rows > kStreamFrom;

  std::vector<uint8_t*> bytes(layers);
  for (int64_t layer = 0; layer < layers; ++layer) bytes[layer] = pools[layer].mutable_data_ptr<uint8_t>();
  at::parallel_for(0, request_count * layers * heads * 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // K and V fastest, then heads: neighbours in memory for both layouts' pages.
      const int64_t kv = i % 2, head = i / 2 % heads, request = i / 2 / heads % request_count, layer = i / 2 / heads / request_count;
      const int64_t list_row = layer * list_layer_step + head * head_step;
      execute(lists[request * list_rows + list_row], bytes[layer] + kv * pool.stride(1) + head * pool.stride(2), stream);
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(quire, library) {
  library.def(
      "compact_group(Tensor(a!)[] pools, Tensor block_table, Tensor kept, Tensor move_offsets, Tensor target_tail, Tensor tail, "
      "Tensor base, Tensor valid_len, int[] first_row, int head_step, int list_layer_step, int window, bool hole_filling, "
      "bool scrub, int request_count) -> ()");
  library.impl("compact_group", c10::DispatchKey::CPU, TORCH_FN(compact_group));
}
