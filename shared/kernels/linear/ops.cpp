// quire::linears on the CPU: several projections of the same rows.

#include "few_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

namespace quire {
namespace {

using at::Tensor;

constexpr int64_t FEW_ROWS = 8; // beyond these the library's matrix product, which reuses registers better, is faster
constexpr int64_t GRAIN_ELEMENTS = 1 << 15; // weights a thread should have before another one helps

template <typename T>
std::vector<Tensor> few_rows(const Tensor& x, const std::vector<Tensor>& weights) {
  const int64_t width = x.size(1), rows = x.size(0);
  const Tensor floats = x.to(at::kFloat).contiguous();
  std::vector<Tensor> outputs;
  std::vector<int64_t> first_tile{0};
  for (const Tensor& w : weights) {
    outputs.push_back(at::empty({rows, w.size(0)}, x.options()));
    first_tile.push_back(first_tile.back() + (w.size(0) + TILE - 1) / TILE);
  }
  const float* from = floats.const_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / (TILE * std::max<int64_t>(width, 1)));
  at::parallel_for(0, first_tile.back(), grain, [&](int64_t begin, int64_t end) {
    size_t which = 0;
    for (int64_t t = begin; t < end; ++t) {
      while (t >= first_tile[which + 1]) {
        ++which;
      }
      const Tensor& w = weights[which];
      const int64_t count = w.size(0), column = (t - first_tile[which]) * TILE;
      T* to = outputs[which].template mutable_data_ptr<T>();
      tile<T>(from, rows, width, w.const_data_ptr<T>(), w.stride(0), to, count, column, std::min(column + TILE, count));
    }
  });
  return outputs;
}

std::vector<Tensor> linears(const Tensor& x, at::TensorList weights) {
  TORCH_CHECK_VALUE(x.dim() >= 1, "x: expected at least one axis, got a scalar");
  TORCH_CHECK_VALUE(!weights.empty(), "weights: expected at least one");
  std::vector<Tensor> kept;
  for (const Tensor& w : weights) {
    TORCH_CHECK_VALUE(
        w.dim() == 2 && w.size(1) == x.size(-1) && w.scalar_type() == x.scalar_type(),
        "weights: expected [out, ", x.size(-1), "] of ", x.scalar_type(), ", got ", w.sizes(), " of ", w.scalar_type());
    kept.push_back(w.stride(1) == 1 ? w : w.contiguous());
  }
  std::vector<int64_t> leading(x.sizes().begin(), x.sizes().end() - 1);
  const int64_t rows = std::accumulate(leading.begin(), leading.end(), int64_t{1}, std::multiplies<>());
  const bool known = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  std::vector<Tensor> outputs;
  if (rows == 0 || rows > FEW_ROWS || !known) {
    for (const Tensor& w : kept) {
      outputs.push_back(at::linear(x, w));
    }
    return outputs;
  }
  const Tensor flat = x.reshape({rows, x.size(-1)});
  outputs = x.scalar_type() == at::kFloat ? few_rows<float>(flat, kept) : few_rows<at::BFloat16>(flat, kept);
  for (Tensor& y : outputs) {
    leading.push_back(y.size(1));
    y = y.view(leading);
    leading.pop_back();
  }
  return outputs;
}

} // namespace

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("linears", linears);
}

} // namespace quire
