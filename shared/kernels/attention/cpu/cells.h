// What is attended to: cells of a cache behind strides and, for pools, a block table; and which of them a query sees.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

constexpr int64_t NO_WINDOW = int64_t{1} << 40; // above any cell; sums with cells stay far from overflow

struct Range {
  int64_t begin, end; // half-open
  int64_t size() const {
    return end - begin;
  }
};

// One plane (keys or values) of a cache; strides in elements, head_dim contiguous.
template <typename T>
struct Plane {
  const T* data;
  int64_t page, head, token;
};

template <typename T>
struct Cells {
  Plane<T> keys, values;
  int64_t page_size;
  const int32_t* table; // null: row b is page b
  int64_t table_stride;

  // Addresses of the rows of cells begin .. begin + count of one kv head.
  void find(int64_t b, int64_t head, int64_t begin, int64_t count, const T** key_rows, const T** value_rows) const {
    int64_t page = begin / page_size;
    int64_t token = begin % page_size;
    for (int64_t i = 0; i < count; ++page, token = 0) {
      const int64_t id = table ? table[b * table_stride + page] : b;
      const T* key = keys.data + id * keys.page + head * keys.head + token * keys.token;
      const T* value = values.data + id * values.page + head * values.head + token * values.token;
      for (const int64_t last = std::min(count, i + page_size - token); i < last; ++i) {
        key_rows[i] = key;
        value_rows[i] = value;
        key += keys.token;
        value += values.token;
      }
    }
  }
};

struct Problem {
  int64_t batch, heads, kv_heads, count, dim; // count: new tokens a row
  int64_t group;                              // query heads a kv head serves
  const int32_t* start;
  float scale;
  int64_t window;
  float softcap;      // 0: none
  const float* sinks; // null: none

  // Cells that at least one of queries first .. last (half-open) of row b sees.
  Range visible(int64_t b, int64_t first, int64_t last) const {
    return {std::max<int64_t>(0, start[b] + first + 1 - window), start[b] + last};
  }
};

// [batch, heads, count, dim] with dim contiguous.
template <typename T>
struct Rows {
  T* data;
  int64_t batch, head, token;
  T* at(int64_t b, int64_t h, int64_t i) const {
    return data + b * batch + h * head + i * token;
  }
};

} // namespace quire
