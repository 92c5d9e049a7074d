// y[m, n] = sum over k of x[m, k] * w[n, k], for a handful of rows m: the products of a decode step.
//
// Reading w is all the work there is, so w is read once whatever the number of rows, in the order it lies in memory, a few of
// its rows at a time: one stream would leave the memory controller idle, many would not fit the registers.
#pragma once

#include "../attention/cpu/vec.h"

#include <algorithm>
#include <cstdint>

namespace quire {

constexpr int64_t TILE = 12; // rows of w taken from memory once; the groups of x's rows after the first find them in cache
constexpr int MAX_GROUP = 4; // rows of x that share one pass: 4 x 3 sums, their factors and nothing more fill 16 registers

// sums[m][r] += x[m] . w[r], in float; x has rows of `width` floats, w rows of `stride` elements.
template <int M, int R, typename T>
inline void dot_products(const float* x, int64_t width, const T* w, int64_t stride, float (&sums)[M][R]) {
  Vec acc[M][R];
  unroll<M * R>([&](auto i) { acc[i / R][i % R] = Vec(0.f); });
  const auto step = [&](const auto& x_at, const auto& w_at) {
    Pair rows[R];
    unroll<R>([&](auto r) { rows[r] = w_at(r); });
    unroll<M>([&](auto m) {
      const Pair factors = x_at(m);
      unroll<R>([&](auto r) {
        acc[m][r] = at::vec::fmadd(factors.lo, rows[r].lo, acc[m][r]);
        acc[m][r] = at::vec::fmadd(factors.hi, rows[r].hi, acc[m][r]);
      });
    });
  };
  int64_t k = 0;
  for (; k + STEP <= width; k += STEP) {
    step([&](auto m) { return load_pair(x + m * width + k); }, [&](auto r) { return load_pair(w + r * stride + k); });
  }
  if (k < width) {
    const int64_t rest = width - k;
    step([&](auto m) { return load_some_pair(x + m * width + k, rest); }, [&](auto r) {
      return load_some_pair(w + r * stride + k, rest);
    });
  }
  unroll<M * R>([&](auto i) {
    sums[i / R][i % R] = at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, acc[i / R][i % R]);
  });
}

// Columns begin .. end of y, which has rows of `count` elements, for M rows of x.
template <int M, int R, typename T>
inline void columns(const float* x, int64_t width, const T* w, int64_t stride, T* y, int64_t count, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + R <= end; n += R) {
    float sums[M][R];
    dot_products<M, R>(x, width, w + n * stride, stride, sums);
    unroll<M * R>([&](auto i) { y[(i / R) * count + n + i % R] = static_cast<T>(sums[i / R][i % R]); });
  }
  for (; n < end; ++n) {
    float sums[M][1];
    dot_products<M, 1>(x, width, w + n * stride, stride, sums);
    unroll<M>([&](auto m) { y[m * count + n] = static_cast<T>(sums[m][0]); });
  }
}

// One tile of columns for all `rows` of x.
template <typename T>
inline void tile(
    const float* x, int64_t rows, int64_t width, const T* w, int64_t stride, T* y, int64_t count, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < rows; m += MAX_GROUP) {
    const float* from = x + m * width;
    T* to = y + m * count;
    switch (std::min<int64_t>(rows - m, MAX_GROUP)) {
      case 1:
        columns<1, 4>(from, width, w, stride, to, count, begin, end);
        break;
      case 2:
        columns<2, 4>(from, width, w, stride, to, count, begin, end);
        break;
      case 3:
        columns<3, 4>(from, width, w, stride, to, count, begin, end);
        break;
      default:
        columns<4, 3>(from, width, w, stride, to, count, begin, end);
    }
  }
}

} // namespace quire
