// Attention of few queries a row: every key and value row is read once for all query heads that share it, and the cells of all
// (row, kv head) pairs are cut into one equal share a thread, so that one long sequence uses every core.
#pragma once

#include "cells.h"
#include "vec.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <vector>

namespace quire {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Unnormalised softmax state of the `count * group` queries of one (row, kv head), query-major: weights relative to the largest
// score so far, their sum, and the weighted sum of values.
struct State {
  std::vector<float> top, sum, acc;

  State(int64_t queries, int64_t width) : top(queries), sum(queries), acc(queries * width) {
    clear();
  }

  void clear() {
    std::fill(top.begin(), top.end(), MINUS_INFINITY);
    std::fill(sum.begin(), sum.end(), 0.f);
    std::fill(acc.begin(), acc.end(), 0.f);
  }

  void add(const State& other) {
    const size_t width = acc.size() / top.size();
    for (size_t r = 0; r < top.size(); ++r) {
      if (other.top[r] == MINUS_INFINITY) {
        continue;
      }
      const float both = std::max(top[r], other.top[r]);
      const float mine = std::exp(top[r] - both), theirs = std::exp(other.top[r] - both);
      top[r] = both;
      sum[r] = mine * sum[r] + theirs * other.sum[r];
      for (size_t d = r * width; d < (r + 1) * width; ++d) {
        acc[d] = mine * acc[d] + theirs * other.acc[d];
      }
    }
  }
};

// Write the queries of (b, kv_head), whose state covers all cells they see.
template <typename T>
void normalise(const Problem& p, const State& state, int64_t b, int64_t kv_head, const Rows<T>& out) {
  const int64_t queries = static_cast<int64_t>(state.top.size());
  const int64_t width = static_cast<int64_t>(state.acc.size()) / queries;
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t h = kv_head * p.group + r % p.group;
    const float sink = p.sinks ? std::exp(p.sinks[h] - state.top[r]) : 0.f;
    store_scaled(state.acc.data() + r * width, p.dim, 1.f / (state.sum[r] + sink), out.at(b, h, r / p.group));
  }
}

template <typename T>
class DecodeKernel {
 public:
  DecodeKernel(const Problem& problem, const Cells<T>& cells)
      : p(problem), cells(cells), width(round_up(p.dim, STEP)), queries(p.count * p.group), q(queries * width),
        scores(queries * BLOCK), state(queries, width) {}

  // Begin a (row, kv head): take its queries, scaled, and forget the last one's state.
  void begin(const Rows<const T>& rows, int64_t b, int64_t kv_head) {
    row = b;
    head = kv_head;
    for (int64_t r = 0; r < queries; ++r) {
      float* to = q.data() + r * width;
      widen(rows.at(b, head * p.group + r % p.group, r / p.group), p.dim, to);
      for (int64_t d = 0; d < p.dim; ++d) {
        to[d] *= p.scale;
      }
    }
    state.clear();
  }

  void attend(Range range) {
    for (int64_t cell = range.begin; cell < range.end; cell += BLOCK) {
      attend_block(cell, std::min(BLOCK, range.end - cell));
    }
  }

  // Of the cells attended to since `begin`.
  const State& result() const {
    return state;
  }

 private:
  static constexpr int64_t BLOCK = 64; // cells between two updates of the state: keys, values and scores stay in L1
  static constexpr int TILE = 4;   // cells scored at once

  const Problem& p;
  const Cells<T>& cells;
  const int64_t width, queries; // width: dim padded to whole steps
  std::vector<float> q, scores; // [queries, width], [queries, BLOCK]
  State state;
  int64_t row = 0, head = 0;
  const T* keys[BLOCK];
  const T* values[BLOCK];

  void attend_block(int64_t cell, int64_t count) {
    cells.find(row, head, cell, count, keys, values);
    const int64_t whole = round_up(count, TILE);
    std::fill(keys + count, keys + whole, keys[count - 1]); // whole tiles only; the repeated scores are never used
    for (int64_t r = 0; r < queries;) {
      r += by_heads(queries - r, [&](auto heads) { this->template score<decltype(heads)::value>(r, whole); });
    }
    for (int64_t i = 0; i < p.count; ++i) {
      const Range seen = p.visible(row, i, i + 1);
      const Range mine{std::max(seen.begin - cell, int64_t{0}), std::min(seen.end - cell, count)};
      if (mine.size() <= 0) {
        continue;
      }
      for (int64_t g = 0; g < p.group; ++g) {
        weigh(i * p.group + g, mine);
      }
      for (int64_t g = 0; g < p.group;) {
        g += by_heads(p.group - g, [&](auto heads) { this->template accumulate<decltype(heads)::value>(i * p.group + g, mine); });
      }
    }
  }

  // Calls `body` for the largest supported number of heads up to `left` and returns that number.
  template <typename Body>
  static int64_t by_heads(int64_t left, const Body& body) {
    if (left >= 4) {
      body(std::integral_constant<int, 4>{});
      return 4;
    }
    if (left == 3) {
      body(std::integral_constant<int, 3>{});
    } else if (left == 2) {
      body(std::integral_constant<int, 2>{});
    } else {
      body(std::integral_constant<int, 1>{});
    }
    return left;
  }

  // scores[r + h][t] = q[r + h] . keys[t], for H queries at once.
  template <int H>
  void score(int64_t r, int64_t count) {
    constexpr int tile = H > 2 ? 2 : TILE; // keeps H * tile sums and their operands in 16 registers
    for (int64_t t = 0; t < count; t += tile) {
      Vec sums[tile][H];
      unroll<tile * H>([&](auto i) { sums[i / H][i % H] = Vec(0.f); });
      const auto step = [&](int64_t d, const auto& read) {
        Vec lo[tile], hi[tile];
        unroll<tile>([&](auto c) {
          const Pair x = read(keys[t + c] + d);
          lo[c] = x.lo;
          hi[c] = x.hi;
        });
        unroll<H>([&](auto h) {
          const Pair y = load_pair(q.data() + (r + h) * width + d);
          unroll<tile>([&](auto c) { sums[c][h] = at::vec::fmadd(hi[c], y.hi, at::vec::fmadd(lo[c], y.lo, sums[c][h])); });
        });
      };
      int64_t d = 0;
      for (; d + STEP <= p.dim; d += STEP) {
        step(d, [](const T* row) { return load_pair(row); });
      }
      if (d < p.dim) {
        step(d, [&](const T* row) { return load_some_pair(row, p.dim - d); });
      }
      unroll<tile * H>([&](auto i) {
        const auto add = [](Vec& a, Vec& b) { return a + b; };
        scores[(r + i % H) * BLOCK + t + i / H] = at::vec::vec_reduce_all<float>(add, sums[i / H][i % H]);
      });
    }
  }

  // Turn the scores of query r over `seen` into weights and move its state to the new largest score.
  void weigh(int64_t r, Range seen) {
    float* weights = scores.data() + r * BLOCK + seen.begin;
    const int64_t count = seen.size();
    if (p.softcap > 0.f) {
      const Vec cap(p.softcap), inverse(1.f / p.softcap);
      at::vec::map<float>([&](Vec x) { return cap * (x * inverse).tanh(); }, weights, weights, count);
    }
    const auto larger = [](Vec& a, Vec& b) { return at::vec::maximum(a, b); };
    const auto add = [](Vec& a, Vec& b) { return a + b; };
    const float top = std::max(state.top[r], at::vec::reduce_all<float>(larger, weights, count));
    const Vec base(top);
    at::vec::map<float>([&](Vec x) { return (x - base).exp_u20(); }, weights, weights, count);
    const float shrink = std::exp(state.top[r] - top);
    state.top[r] = top;
    state.sum[r] = shrink * state.sum[r] + at::vec::reduce_all<float>(add, weights, count);
    if (shrink != 1.f) {
      float* acc = state.acc.data() + r * width;
      at::vec::map<float>([&](Vec x) { return x * Vec(shrink); }, acc, acc, width);
    }
  }

  // acc[r + h] += weights[r + h] . values, for H queries at once.
  template <int H>
  void accumulate(int64_t r, Range seen) {
    const float* weights = scores.data() + r * BLOCK;
    for (int64_t d = 0; d < p.dim; d += STEP) {
      Vec lo[H], hi[H];
      unroll<H>([&](auto h) {
        const float* acc = state.acc.data() + (r + h) * width + d;
        lo[h] = Vec::loadu(acc);
        hi[h] = Vec::loadu(acc + LANES);
      });
      const auto add = [&](int64_t t, const Pair& x) {
        unroll<H>([&](auto h) {
          const Vec weight(weights[h * BLOCK + t]);
          lo[h] = at::vec::fmadd(weight, x.lo, lo[h]);
          hi[h] = at::vec::fmadd(weight, x.hi, hi[h]);
        });
      };
      if (d + STEP <= p.dim) {
        for (int64_t t = seen.begin; t < seen.end; ++t) {
          add(t, load_pair(values[t] + d));
        }
      } else {
        for (int64_t t = seen.begin; t < seen.end; ++t) {
          add(t, load_some_pair(values[t] + d, p.dim - d));
        }
      }
      unroll<H>([&](auto h) {
        float* acc = state.acc.data() + (r + h) * width + d;
        lo[h].store(acc);
        hi[h].store(acc + LANES);
      });
    }
  }
};

// What one thread has of a (row, kv head) that several threads share.
struct Share {
  int64_t b, head;
  bool opens, closes; // holds the first, the last visible cell
  State state;
};

template <typename T>
void decode(const Problem& p, const Rows<const T>& q, const Cells<T>& cells, const Rows<T>& out) {
  constexpr int64_t MIN_SHARE_BYTES = 64 << 10; // below it another thread costs more than it brings
  int64_t total = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    total += p.kv_heads * p.visible(b, 0, p.count).size();
  }
  const int64_t bytes = total * 2 * p.dim * static_cast<int64_t>(sizeof(T));
  const int64_t workers = std::clamp<int64_t>(bytes / MIN_SHARE_BYTES, 1, at::get_num_threads());

  std::vector<std::vector<Share>> shares(workers); // in cell order, at most two a worker
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    DecodeKernel<T> kernel(p, cells);
    for (int64_t worker = first; worker < last; ++worker) {
      const Range mine{total * worker / workers, total * (worker + 1) / workers};
      int64_t passed = 0;
      for (int64_t b = 0; b < p.batch; ++b) {
        const Range seen = p.visible(b, 0, p.count);
        for (int64_t head = 0; head < p.kv_heads; ++head, passed += seen.size()) {
          const Range part{
              seen.begin + std::max<int64_t>(mine.begin - passed, 0), std::min(seen.end, seen.begin + mine.end - passed)};
          if (part.size() <= 0) {
            continue;
          }
          kernel.begin(q, b, head);
          kernel.attend(part);
          const bool opens = part.begin == seen.begin, closes = part.end == seen.end;
          if (opens && closes) {
            normalise(p, kernel.result(), b, head, out);
          } else {
            shares[worker].push_back({b, head, opens, closes, kernel.result()});
          }
        }
      }
    }
  });

  State whole(p.count * p.group, round_up(p.dim, STEP));
  for (const auto& of_worker : shares) {
    for (const Share& share : of_worker) {
      if (share.opens) {
        whole.clear();
      }
      whole.add(share.state);
      if (share.closes) {
        normalise(p, whole, share.b, share.head, out);
      }
    }
  }
}

} // namespace quire
