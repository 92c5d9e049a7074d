// Float vectors over rows of float, bfloat16 or half.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>

#include <cstdint>
#include <type_traits>

namespace quire {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
constexpr int64_t STEP = 2 * LANES; // elements taken at once: one vector of a 16-bit type, two of float

struct Pair {
  Vec lo, hi;
};

// body(0), body(1), .. body(N - 1), written out: arrays indexed inside stay in registers.
template <int N, typename Body>
inline void unroll(const Body& body) {
  c10::ForcedUnroll<N>{}(body);
}

constexpr int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

inline Pair load_pair(const float* from) {
  return {Vec::loadu(from), Vec::loadu(from + LANES)};
}

template <typename T>
inline Pair load_pair(const T* from) {
  auto [lo, hi] = at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from));
  return {lo, hi};
}

// The first `count` < STEP elements; zeros behind them.
template <typename T>
inline Pair load_some_pair(const T* from, int64_t count) {
  float wide[STEP] = {};
  for (int64_t i = 0; i < count; ++i) {
    wide[i] = static_cast<float>(from[i]);
  }
  return load_pair(wide);
}

inline void store_pair(const Pair& x, float* to) {
  x.lo.store(to);
  x.hi.store(to + LANES);
}

template <typename T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + STEP <= count; i += STEP) {
    store_pair(load_pair(from + i), to + i);
  }
  for (; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

// to[i] = factor * from[i], rounded to T once.
template <typename T>
inline void store_scaled(const float* from, int64_t count, float factor, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<T>(factor * from[i]);
  }
}

} // namespace quire
