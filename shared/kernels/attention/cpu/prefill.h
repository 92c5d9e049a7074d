// Attention of many queries a row: blocks of queries against blocks of cells, both products as register tiles.
//
// Queries of one block are the lanes: a panel is STEP queries, its scores lie cell by cell, so that masking, largest score and
// sum run over whole vectors.
#pragma once

#include "cells.h"
#include "vec.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

namespace quire {

template <typename T>
class PrefillKernel {
 public:
  // `block`: most queries of a row taken at once.
  PrefillKernel(const Problem& problem, const Cells<T>& cells, int64_t block)
      : p(problem), cells(cells), width(round_up(p.dim, STEP)), panels(round_up(block * p.group, STEP) / STEP),
        q(panels * p.dim * STEP), scores(BLOCK * STEP), acc(panels * STEP * width), top(panels * STEP), sum(panels * STEP),
        wide_keys(std::is_same_v<T, float> ? 0 : BLOCK * p.dim), values(BLOCK * width) {}

  // Queries `span` of (b, kv_head), from their scores to the output.
  void run(const Rows<const T>& rows, const Rows<T>& out, int64_t b, int64_t kv_head, Range span) {
    take(rows, b, kv_head, span);
    const Range seen = p.visible(b, span.begin, span.end);
    for (int64_t cell = seen.begin; cell < seen.end; cell += BLOCK) {
      const int64_t count = std::min(BLOCK, seen.end - cell);
      find(b, kv_head, cell, count);
      for (int64_t panel = 0; panel < used; ++panel) {
        attend(b, span.begin, panel, cell, count);
      }
    }
    store(out, b, kv_head, span);
  }

 private:
  static constexpr int TILE = 6;              // rows of a register tile: with two vectors a row, 12 sums and their operands fit
  static constexpr int64_t BLOCK = 16 * TILE; // cells a panel attends to before the next panel does

  const Problem& p;
  const Cells<T>& cells;
  const int64_t width, panels;
  int64_t used = 0;             // panels that hold queries of the present block
  std::vector<float> q;         // [panels, dim, STEP], scaled
  std::vector<float> scores;    // [BLOCK, STEP] of one panel
  std::vector<float> acc;       // [panels * STEP, width]
  std::vector<float> top, sum;  // [panels * STEP]
  std::vector<float> wide_keys; // [BLOCK, dim], unless the cache's own rows serve
  std::vector<float> values;    // [width / STEP, BLOCK, STEP]: a column of STEP is contiguous, whatever the cache's strides
  const T* key_rows[BLOCK];
  const T* value_rows[BLOCK];
  const float* keys[BLOCK];

  // Query i, head g of the group is row i * group + g; its panel is row / STEP, its lane row % STEP.
  void take(const Rows<const T>& rows, int64_t b, int64_t kv_head, Range span) {
    const int64_t count = span.size() * p.group;
    used = round_up(count, STEP) / STEP;
    std::fill(q.begin(), q.end(), 0.f);
    for (int64_t r = 0; r < count; ++r) {
      const T* from = rows.at(b, kv_head * p.group + r % p.group, span.begin + r / p.group);
      float* to = q.data() + r / STEP * p.dim * STEP + r % STEP;
      for (int64_t d = 0; d < p.dim; ++d) {
        to[d * STEP] = p.scale * static_cast<float>(from[d]);
      }
    }
    std::fill(top.begin(), top.end(), -std::numeric_limits<float>::infinity());
    std::fill(sum.begin(), sum.end(), 0.f);
    std::fill(acc.begin(), acc.end(), 0.f);
  }

  void find(int64_t b, int64_t kv_head, int64_t cell, int64_t count) {
    cells.find(b, kv_head, cell, count, key_rows, value_rows);
    for (int64_t t = 0; t < count; ++t) {
      if constexpr (std::is_same_v<T, float>) {
        keys[t] = key_rows[t];
      } else {
        float* to = wide_keys.data() + t * p.dim;
        widen(key_rows[t], p.dim, to);
        keys[t] = to;
      }
      for (int64_t d = 0; d < p.dim; d += STEP) {
        const T* from = value_rows[t] + d;
        store_pair(d + STEP <= p.dim ? load_pair(from) : load_some_pair(from, p.dim - d), values.data() + d * BLOCK + t * STEP);
      }
    }
    std::fill(keys + count, keys + round_up(count, TILE), keys[count - 1]); // whole tiles only; their scores are never used
  }

  void attend(int64_t b, int64_t first, int64_t panel, int64_t cell, int64_t count) {
    // Lanes [0, before) of the panel sit below cell t, lanes [after, STEP) have it behind their window.
    const int64_t lane_of_cell = (cell - p.start[b] - first) * p.group - panel * STEP;
    const auto before = [&](int64_t t) { return std::clamp<int64_t>(lane_of_cell + t * p.group, 0, STEP); };
    const auto after = [&](int64_t t) { return std::clamp<int64_t>(lane_of_cell + (t + p.window) * p.group, 0, STEP); };
    if (before(0) == STEP || after(count - 1) == 0) {
      return; // no query of the panel sees any of the cells
    }
    score(panel, count);
    for (int64_t t = 0; t < count; ++t) {
      float* of_cell = scores.data() + t * STEP;
      std::fill(of_cell, of_cell + before(t), -std::numeric_limits<float>::infinity());
      std::fill(of_cell + after(t), of_cell + STEP, -std::numeric_limits<float>::infinity());
    }
    weigh(panel, count);
    accumulate(panel, count);
  }

  void score(int64_t panel, int64_t count) {
    const float* of_panel = q.data() + panel * p.dim * STEP;
    for (int64_t t = 0; t < count; t += TILE) {
      Vec lo[TILE], hi[TILE];
      unroll<TILE>([&](auto c) { lo[c] = hi[c] = Vec(0.f); });
      for (int64_t d = 0; d < p.dim; ++d) {
        const Pair x = load_pair(of_panel + d * STEP);
        unroll<TILE>([&](auto c) {
          const Vec key(keys[t + c][d]);
          lo[c] = at::vec::fmadd(key, x.lo, lo[c]);
          hi[c] = at::vec::fmadd(key, x.hi, hi[c]);
        });
      }
      unroll<TILE>([&](auto c) {
        float* to = scores.data() + (t + c) * STEP;
        lo[c].store(to);
        hi[c].store(to + LANES);
      });
    }
    if (p.softcap > 0.f) {
      const Vec cap(p.softcap), inverse(1.f / p.softcap);
      at::vec::map<float>([&](Vec x) { return cap * (x * inverse).tanh(); }, scores.data(), scores.data(), count * STEP);
    }
  }

  // Scores to weights relative to each lane's new largest score; what the lane has is shrunk to it.
  void weigh(int64_t panel, int64_t count) {
    const Vec lowest(std::numeric_limits<float>::lowest()); // keeps -inf - -inf out of lanes that have seen nothing yet
    for (int64_t half = 0; half < STEP; half += LANES) {
      float* weights = scores.data() + half;
      float* tops = top.data() + panel * STEP + half;
      float* sums = sum.data() + panel * STEP + half;
      const Vec old = Vec::loadu(tops);
      Vec best = old;
      for (int64_t t = 0; t < count; ++t) {
        best = at::vec::maximum(best, Vec::loadu(weights + t * STEP));
      }
      const Vec base = at::vec::maximum(best, lowest);
      Vec total(0.f);
      for (int64_t t = 0; t < count; ++t) {
        const Vec weight = (Vec::loadu(weights + t * STEP) - base).exp_u20();
        weight.store(weights + t * STEP);
        total = total + weight;
      }
      const Vec shrink = (old - base).exp();
      best.store(tops);
      at::vec::fmadd(shrink, Vec::loadu(sums), total).store(sums);
      float factors[LANES];
      shrink.store(factors);
      for (int64_t lane = 0; lane < LANES; ++lane) {
        if (factors[lane] != 1.f) {
          float* of_lane = acc.data() + (panel * STEP + half + lane) * width;
          for (int64_t d = 0; d < width; ++d) {
            of_lane[d] *= factors[lane];
          }
        }
      }
    }
  }

  void accumulate(int64_t panel, int64_t count) {
    for (int64_t d = 0; d < width; d += STEP) {
      int64_t lane = 0;
      for (; lane + TILE <= STEP; lane += TILE) {
        accumulate_tile<TILE>(panel, lane, d, count);
      }
      if constexpr (STEP % TILE > 0) {
        accumulate_tile<STEP % TILE>(panel, lane, d, count);
      }
    }
  }

  // acc += weights . values for N lanes of a panel and STEP columns from d.
  template <int N>
  void accumulate_tile(int64_t panel, int64_t lane, int64_t d, int64_t count) {
    const float* column = values.data() + d * BLOCK;
    const float* weights = scores.data() + lane;
    float* sums = acc.data() + (panel * STEP + lane) * width + d;
    Vec lo[N], hi[N];
    unroll<N>([&](auto c) {
      lo[c] = Vec::loadu(sums + c * width);
      hi[c] = Vec::loadu(sums + c * width + LANES);
    });
    for (int64_t t = 0; t < count; ++t) {
      const Pair x = load_pair(column + t * STEP);
      unroll<N>([&](auto c) {
        const Vec weight(weights[t * STEP + c]);
        lo[c] = at::vec::fmadd(weight, x.lo, lo[c]);
        hi[c] = at::vec::fmadd(weight, x.hi, hi[c]);
      });
    }
    unroll<N>([&](auto c) {
      lo[c].store(sums + c * width);
      hi[c].store(sums + c * width + LANES);
    });
  }

  void store(const Rows<T>& out, int64_t b, int64_t kv_head, Range span) const {
    for (int64_t r = 0; r < span.size() * p.group; ++r) {
      const int64_t h = kv_head * p.group + r % p.group;
      const float sink = p.sinks ? std::exp(p.sinks[h] - top[r]) : 0.f;
      store_scaled(acc.data() + r * width, p.dim, 1.f / (sum[r] + sink), out.at(b, h, span.begin + r / p.group));
    }
  }
};

template <typename T>
void prefill(const Problem& p, const Rows<const T>& q, const Cells<T>& cells, const Rows<T>& out) {
  constexpr int64_t ROWS = 128; // query rows a kernel holds: enough to use a block of keys many times, few enough to stay in L2
  const int64_t block = std::min(p.count, std::max<int64_t>(1, ROWS / p.group));
  const int64_t blocks = (p.count + block - 1) / block;
  const int64_t heads = p.batch * p.kv_heads;
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(heads * blocks, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    PrefillKernel<T> kernel(p, cells, block);
    for (int64_t worker = first; worker < last; ++worker) {
      for (int64_t item = next++; item < heads * blocks; item = next++) {
        const int64_t from = (blocks - 1 - item / heads) * block; // the last block sees most cells: longest work first
        const int64_t row = item % heads;
        kernel.run(q, out, row / p.kv_heads, row % p.kv_heads, {from, std::min(p.count, from + block)});
      }
    }
  });
}

} // namespace quire
