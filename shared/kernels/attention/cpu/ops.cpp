// CPU kernels of quire::attend and quire::paged_attend. The schemas are defined in ops.py; reference.py is the specification.

#include "cells.h"
#include "decode.h"
#include "prefill.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <optional>

namespace quire {
namespace {

using at::Tensor;
using Window = std::optional<int64_t>;
using Softcap = std::optional<double>;
using Sinks = std::optional<Tensor>;

constexpr int64_t FEW_QUERIES = 4; // up to here reading keys and values once beats tiles of queries

void expect_sizes(const Tensor& tensor, const char* name, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes, name, ": expected ", sizes, ", got ", tensor.sizes());
}

void expect_like(const Tensor& tensor, const char* name, const Tensor& q) {
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": expected device ", q.device(), " like q, got ", tensor.device());
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == q.scalar_type(), name, ": expected ", q.scalar_type(), " like q, got ", tensor.scalar_type());
}

void expect_index(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, ": expected device cpu, got ", tensor.device());
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt, name, ": expected int32, got ", tensor.scalar_type());
}

void expect_rows(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.stride(-1) == 1, name, ": expected head_dim of stride 1, got stride ", tensor.stride(-1));
}

// What both ops ask of queries, starts and options, and the problem they state.
Problem problem_of(
    const Tensor& q,
    const Tensor& start,
    int64_t kv_heads,
    double scale,
    Window window,
    Softcap softcap,
    const Sinks& sinks) {
  TORCH_CHECK_VALUE(q.dim() == 4, "q: expected [batch, heads, count, head_dim], got ", q.sizes());
  TORCH_CHECK_VALUE(
      kv_heads > 0 && q.size(1) % kv_heads == 0, "q: expected a multiple of ", kv_heads, " kv heads, got ", q.size(1), " heads");
  expect_index(start, "start");
  expect_sizes(start, "start", {q.size(0)});
  TORCH_CHECK_VALUE(!window || *window >= 1, "window: expected at least 1 or None, got ", *window);
  TORCH_CHECK_VALUE(!softcap || *softcap > 0, "softcap: expected above 0 or None, got ", *softcap);
  if (sinks) {
    if (sinks->scalar_type() != at::kFloat) {
      expect_like(*sinks, "sinks", q);
    }
    expect_sizes(*sinks, "sinks", {q.size(1)});
  }
  Problem p{};
  p.batch = q.size(0);
  p.heads = q.size(1);
  p.kv_heads = kv_heads;
  p.count = q.size(2);
  p.dim = q.size(3);
  p.group = p.heads / kv_heads;
  p.start = start.const_data_ptr<int32_t>();
  p.scale = static_cast<float>(scale);
  p.window = window ? std::min(*window, NO_WINDOW) : NO_WINDOW;
  p.softcap = softcap ? static_cast<float>(*softcap) : 0.f;
  return p;
}

void expect_starts(const Problem& p, int64_t capacity) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = p.start[b];
    TORCH_CHECK_VALUE(
        first >= 0 && first + p.count <= capacity,
        "start[", b, "]: expected 0..", capacity - p.count, " (room for ", p.count, " new tokens in ", capacity, " cells), got ",
        first);
  }
}

// Every page that holds a visible cell exists; other entries are never read.
void expect_pages(const Problem& p, const Tensor& table, int64_t page_size, int64_t num_pages) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int32_t* ids = table.const_data_ptr<int32_t>() + b * table.stride(0);
    const Range seen = p.visible(b, 0, p.count);
    for (int64_t page = seen.begin / page_size; page * page_size < seen.end; ++page) {
      TORCH_CHECK_VALUE(
          ids[page] >= 0 && ids[page] < num_pages,
          "block_table[", b, ", ", page, "]: expected a page in 0..", num_pages - 1, ", got ", ids[page]);
    }
  }
}

template <typename T>
Rows<T> rows_of(const Tensor& tensor) {
  return {static_cast<T*>(const_cast<void*>(tensor.const_data_ptr())), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Tensor with_contiguous_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

template <typename T>
Tensor run(Problem p, const Tensor& q, const Cells<T>& cells, const Sinks& sinks) {
  const Tensor float_sinks = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  p.sinks = sinks ? float_sinks.const_data_ptr<float>() : nullptr;
  // Token-major, so that the caller's transpose and reshape back to [batch, count, heads * head_dim] is a view.
  const Tensor out = at::empty({p.batch, p.count, p.heads, p.dim}, q.options()).transpose(1, 2);
  if (out.numel() > 0) {
    const Tensor queries = with_contiguous_rows(q);
    const auto body = p.count <= FEW_QUERIES ? decode<T> : prefill<T>;
    body(p, rows_of<const T>(queries), cells, rows_of<T>(out));
  }
  return out;
}

// Calls `body` with a value of q's element type.
template <typename Body>
Tensor by_type(const Tensor& q, const Body& body) {
  switch (q.scalar_type()) {
    case at::kFloat:
      return body(float{});
    case at::kBFloat16:
      return body(at::BFloat16{});
    case at::kHalf:
      return body(at::Half{});
    default:
      TORCH_CHECK_VALUE(false, "q: expected float32, bfloat16 or float16, got ", q.scalar_type());
  }
}

Tensor attend(
    const Tensor& q,
    const Tensor& k_cache,
    const Tensor& v_cache,
    const Tensor& start,
    double scale,
    Window window,
    Softcap softcap,
    const Sinks& sinks) {
  TORCH_CHECK_VALUE(k_cache.dim() == 4, "k_cache: expected [batch, kv_heads, cells, head_dim], got ", k_cache.sizes());
  const Tensor first = start.contiguous();
  const Problem p = problem_of(q, first, k_cache.size(1), scale, window, softcap, sinks);
  for (const auto& [cache, name] : {std::pair{&k_cache, "k_cache"}, std::pair{&v_cache, "v_cache"}}) {
    expect_like(*cache, name, q);
    expect_sizes(*cache, name, {p.batch, p.kv_heads, k_cache.size(2), p.dim});
    expect_rows(*cache, name);
  }
  expect_starts(p, k_cache.size(2));
  return by_type(q, [&](auto element) {
    using T = decltype(element);
    const auto plane = [](const Tensor& cache) {
      return Plane<T>{cache.const_data_ptr<T>(), cache.stride(0), cache.stride(1), cache.stride(2)};
    };
    return run<T>(p, q, {plane(k_cache), plane(v_cache), k_cache.size(2), nullptr, 0}, sinks);
  });
}

// Copy the new rows into the cells that the block table gives them.
template <typename T>
void write(const Problem& p, const Rows<const T>& k, const Rows<const T>& v, const Cells<T>& cells) {
  const size_t row_bytes = p.dim * sizeof(T);
  const int64_t grain = std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, 2 * p.count * row_bytes));
  at::parallel_for(0, p.batch * p.kv_heads, grain, [&](int64_t first, int64_t last) {
    std::vector<const T*> keys(p.count), values(p.count);
    for (int64_t item = first; item < last; ++item) {
      const int64_t b = item / p.kv_heads, head = item % p.kv_heads;
      cells.find(b, head, p.start[b], p.count, keys.data(), values.data());
      for (int64_t i = 0; i < p.count; ++i) {
        std::memcpy(const_cast<T*>(keys[i]), k.at(b, head, i), row_bytes);
        std::memcpy(const_cast<T*>(values[i]), v.at(b, head, i), row_bytes);
      }
    }
  });
}

Tensor paged_attend(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    Tensor pool,
    const Tensor& block_table,
    const Tensor& start,
    int64_t page_dim,
    double scale,
    Window window,
    Softcap softcap,
    const Sinks& sinks) {
  TORCH_CHECK_VALUE(page_dim == 0 || page_dim == 1, "page_dim: expected 0 (paged) or 1 (linear), got ", page_dim);
  TORCH_CHECK_VALUE(
      pool.dim() == 5, "pool: expected 5 axes, pages and K/V in either order, kv_heads, page_size, head_dim, got ", pool.sizes());
  const int64_t kv_dim = 1 - page_dim, page_size = pool.size(3);
  const Tensor first = start.contiguous();
  const Problem p = problem_of(q, first, pool.size(2), scale, window, softcap, sinks);
  expect_like(k, "k", q);
  expect_like(v, "v", q);
  expect_like(pool, "pool", q);
  expect_sizes(k, "k", {p.batch, p.kv_heads, p.count, p.dim});
  expect_sizes(v, "v", {p.batch, p.kv_heads, p.count, p.dim});
  TORCH_CHECK_VALUE(pool.size(kv_dim) == 2, "pool: expected 2 planes, K and V, on axis ", kv_dim, ", got ", pool.size(kv_dim));
  TORCH_CHECK_VALUE(pool.size(4) == p.dim, "pool: expected head_dim ", p.dim, " like q, got ", pool.size(4));
  expect_rows(pool, "pool");
  expect_index(block_table, "block_table");
  TORCH_CHECK_VALUE(
      block_table.dim() == 2 && block_table.size(0) == p.batch,
      "block_table: expected [", p.batch, ", max_pages], got ", block_table.sizes());
  const Tensor table = with_contiguous_rows(block_table);
  expect_starts(p, table.size(1) * page_size);
  expect_pages(p, table, page_size, pool.size(page_dim));

  return by_type(q, [&](auto element) {
    using T = decltype(element);
    const auto plane = [&](int64_t kind) {
      T* data = pool.mutable_data_ptr<T>() + kind * pool.stride(kv_dim);
      return Plane<T>{data, pool.stride(page_dim), pool.stride(2), pool.stride(3)};
    };
    const Cells<T> cells{plane(0), plane(1), page_size, table.const_data_ptr<int32_t>(), table.stride(0)};
    const Tensor keys = with_contiguous_rows(k), values = with_contiguous_rows(v);
    write<T>(p, rows_of<const T>(keys), rows_of<const T>(values), cells);
    return run<T>(p, q, cells, sinks);
  });
}

} // namespace

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("attend", &attend);
  m.impl("paged_attend", &paged_attend);
}

} // namespace quire
