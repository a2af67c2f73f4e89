// SPDX-License-Identifier: Apache-2.0
/// @file
/// The pure parts of top_k.hpp, and how the CPU selects. Selections through a backend are in the
/// conformance suite.
#include "pulseinfer/top_k.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/host_top_k.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/far_array.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::ordered_score_bits;
using pulseinfer::top_k_index;
using pulseinfer::top_k_key;
using pulseinfer::detail::collect_function;
using pulseinfer::detail::random_source;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::vector<float> interesting_scores() {
  using limits = std::numeric_limits<float>;
  std::vector<float> scores = {
      -inf, limits::lowest(),     -1.5f,         -limits::min(), -limits::denorm_min(),
      0.0f, limits::denorm_min(), limits::min(), 1.0f,           limits::max(),
      inf};
  random_source draw(3);
  while (scores.size() < 400) {
    const float score = pulseinfer::detail::float_of(static_cast<std::uint32_t>(draw.next()));
    if (!std::isnan(score)) scores.push_back(score);
  }
  return scores;
}

using keys_list = std::vector<std::uint64_t>;

/// The positions of the k largest keys, ascending: by a sort of all.
std::vector<std::int32_t> sorted_top_k(const keys_list& keys, std::size_t k) {
  std::vector<std::int32_t> order(keys.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&keys](std::int32_t i) { return keys[static_cast<std::size_t>(i)]; };
  std::sort(order.begin(), order.end(),
            [&](std::int32_t a, std::int32_t b) { return key(a) > key(b); });
  order.resize(std::min(k, order.size()));
  std::sort(order.begin(), order.end());
  return order;
}

/// The least of the k largest keys.
std::uint64_t sorted_top_k_threshold(const keys_list& keys, std::size_t k) {
  std::uint64_t least = ~std::uint64_t{0};
  for (const std::int32_t at : sorted_top_k(keys, k)) {
    least = std::min(least, keys[static_cast<std::size_t>(at)]);
  }
  return least;
}

/// What this machine can collect keys with.
std::vector<collect_function> collect_functions() {
  std::vector<collect_function> all = {&pulseinfer::detail::collect_keys_portable};
  const collect_function best = pulseinfer::detail::best_collect_keys();
  if (best != all[0]) all.push_back(best);
  return all;
}

/// The CPU's selection of k of the keys, with guards behind what it may write. Empty if it wrote
/// there.
std::vector<std::int32_t> host_top_k(const keys_list& keys, std::size_t k,
                                     collect_function collect) {
  constexpr std::int32_t guard = -77;
  keys_list scratch(keys.size() + 1, 5);
  std::vector<std::int32_t> positions(keys.size() + 1, guard), selected(k + 1, guard);
  pulseinfer::detail::select_top_k(keys.data(), static_cast<std::int64_t>(keys.size()),
                                   static_cast<std::int64_t>(k), collect, scratch.data(),
                                   positions.data(), selected.data(), 0);
  if (scratch.back() != 5 || positions.back() != guard || selected.back() != guard) return {};
  selected.pop_back();
  return selected;
}

/// Orders of keys that a selection may find hard.
std::vector<std::pair<std::string, keys_list>> hard_orders(std::int32_t size) {
  std::vector<std::pair<std::string, keys_list>> all;
  const auto add = [&](const char* name, auto score) {
    keys_list keys;
    for (std::int32_t i = 0; i < size; ++i) {
      keys.push_back(top_k_key(static_cast<float>(score(i)), i));
    }
    all.emplace_back(name, std::move(keys));
  };
  random_source draw(static_cast<std::uint64_t>(size));
  add("random", [&](std::int32_t) { return draw.below(1 << 20); });
  add("few scores", [&](std::int32_t) { return draw.below(3); });
  add("ascending", [](std::int32_t i) { return i; });
  add("descending", [](std::int32_t i) { return -i; });
  add("all equal", [](std::int32_t) { return 1.5f; });
  add("up and down", [&](std::int32_t i) { return std::min(i, size - i); });
  add("saw", [](std::int32_t i) { return i % 67; });
  add("one bucket", [](std::int32_t i) { return 1.0f + 1e-7f * static_cast<float>(i % 3); });
  add("all NaN", [](std::int32_t) { return not_a_number; });
  add("denormals", [](std::int32_t i) {
    return pulseinfer::detail::float_of(static_cast<std::uint32_t>(i * 7919 % 65'536));
  });
  add("infinities", [](std::int32_t i) { return i % 5 == 0 ? not_a_number : i % 2 ? inf : -inf; });
  return all;
}

}  // namespace

TEST_CASE("top-k: ordered bits order as scores do") {
  const std::vector<float> scores = interesting_scores();
  bool all = true;
  for (const float a : scores) {
    for (const float b : scores) {
      all = all && (a < b) == (ordered_score_bits(a) < ordered_score_bits(b));
    }
  }
  CHECK(all);
}

TEST_CASE("top-k: zeros are equal, NaN of any kind is below everything") {
  CHECK(ordered_score_bits(0.0f) == ordered_score_bits(-0.0f));
  const std::uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu};
  for (const std::uint32_t bits : nans) {
    CHECK(ordered_score_bits(pulseinfer::detail::float_of(bits)) ==
          ordered_score_bits(not_a_number));
    CHECK(ordered_score_bits(pulseinfer::detail::float_of(bits)) < ordered_score_bits(-inf));
  }
}

TEST_CASE("top-k: a key gives its index back, the lower index has the larger key") {
  const std::int32_t last = static_cast<std::int32_t>(pulseinfer::max_top_k_columns - 1);
  for (const float score : {-inf, -1.0f, 0.0f, 1.0f, inf, not_a_number}) {
    for (const std::int32_t index : {0, 1, 65'535, 65'536, last - 1, last}) {
      CHECK(top_k_index(top_k_key(score, index)) == index);
    }
    CHECK(top_k_key(score, 0) > top_k_key(score, 1));
    CHECK(top_k_key(score, last - 1) > top_k_key(score, last));
  }
  CHECK(top_k_key(-1.0f, last) > top_k_key(-inf, 0));
  CHECK(top_k_key(-0.0f, 0) > top_k_key(0.0f, 1));
}

TEST_CASE("top-k: compaction does not depend on the size of the group") {
  constexpr std::int64_t rows = 4;
  constexpr std::int64_t stride = 150;
  const std::vector<std::int32_t> begin = {0, 7, 20, 9};
  const std::vector<std::int32_t> end = {150, 100, 20, 4};  // the last one ends before it begins
  const std::vector<std::int32_t> limits = {29, -3, 500, 7};
  random_source draw(5);
  keys_list keys;
  for (std::int64_t i = 0; i < rows * stride; ++i) {
    const auto score = static_cast<float>(draw.below(20));
    keys.push_back(top_k_key(score, static_cast<std::int32_t>(i % stride)));
  }
  for (const bool limited : {false, true}) {
    CAPTURE(limited);
    const pulseinfer::top_k_keys view{keys.data(), stride, begin.data(), end.data(),
                                      limited ? limits.data() : nullptr};
    for (const std::int64_t k : {0, 1, 30, 93, 94, 200}) {
      CAPTURE(k);
      const auto size = static_cast<std::size_t>(rows * k);
      std::vector<std::int32_t> selected(size, -1), counts;
      keys_list thresholds(rows, 0);
      for (std::size_t r = 0; r < rows; ++r) {
        const std::int64_t length = std::max(end[r] - begin[r], 0);
        const std::int64_t most = limited ? std::clamp<std::int64_t>(limits[r], 0, k) : k;
        const auto first = keys.begin() + static_cast<std::ptrdiff_t>(r) * stride + begin[r];
        const keys_list row(first, first + length);
        const std::vector<std::int32_t> best = sorted_top_k(row, static_cast<std::size_t>(most));
        counts.push_back(static_cast<std::int32_t>(best.size()));
        for (std::size_t i = 0; i < best.size(); ++i) {
          selected[r * static_cast<std::size_t>(k) + i] = best[i] + begin[r];
        }
        if (best.empty()) continue;
        thresholds[r] = row[static_cast<std::size_t>(best[0])];
        for (const std::int32_t at : best) {
          thresholds[r] = std::min(thresholds[r], row[static_cast<std::size_t>(at)]);
        }
      }
      for (const int lanes : {1, 2, 5, 32}) {
        CAPTURE(lanes);
        std::vector<std::int32_t> written(size, 98), written_counts(rows, 98);
        test::run_rows(rows, lanes,
                       pulseinfer::compact_top_k{view, k, thresholds.data(), written.data(),
                                                 written_counts.data()});
        CHECK((written == selected));
        CHECK((written_counts == counts));
      }
    }
  }
}

TEST_CASE("top-k: the CPU keeps the keys that are not below a threshold, by any instructions") {
  random_source draw(8);
  for (const std::size_t size : {0u, 1u, 31u, 32u, 33u, 64u, 95u, 300u}) {
    CAPTURE(size);
    for (const std::uint64_t top :
         keys_list{0, 0x7fffffffffffff00, 0x8000000000000000, 0xffffffffffffff00}) {
      keys_list keys(size);
      for (std::uint64_t& key : keys) key = top + draw.below(200) - (top == 0 ? 0 : 100);
      for (const std::uint64_t threshold : {top, top + 50, std::uint64_t{0}, ~std::uint64_t{0}}) {
        std::vector<std::int32_t> expected;
        for (std::size_t i = 0; i < size; ++i) {
          if (keys[i] >= threshold) expected.push_back(static_cast<std::int32_t>(i));
        }
        for (const collect_function collect : collect_functions()) {
          std::vector<std::int32_t> positions(size + 1, -77);
          const auto kept =
              collect(keys.data(), static_cast<std::int64_t>(size), threshold, positions.data());
          CHECK(kept == static_cast<std::int64_t>(expected.size()));
          CHECK(positions.back() == -77);
          positions.resize(expected.size());
          CHECK((positions == expected));
        }
      }
    }
  }
}

TEST_CASE("top-k: the CPU's selection is a sort's, for every order of the keys") {
  for (const std::int32_t size : {2, 3, 63, 64, 65, 511, 512, 513, 1'023, 1'025, 4'096, 8'193}) {
    CAPTURE(size);
    for (const auto& order : hard_orders(size)) {
      INFO(order.first);
      const keys_list& keys = order.second;
      for (const std::int32_t k : {1, 2, size / 100, size / 16, size / 2, size - 1}) {
        if (k < 1 || k >= size) continue;
        CAPTURE(k);
        const std::vector<std::int32_t> best = sorted_top_k(keys, static_cast<std::size_t>(k));
        for (const collect_function collect : collect_functions()) {
          CHECK((host_top_k(keys, static_cast<std::size_t>(k), collect) == best));
        }
      }
    }
  }
}

TEST_CASE("top-k: a sample that misleads changes nothing") {
  constexpr std::int64_t size = 8'192;
  // Where the sample is taken, from keys that say so.
  keys_list places(size), sample(size);
  std::iota(places.begin(), places.end(), 0u);
  constexpr std::uint64_t unset = ~std::uint64_t{0};
  std::fill(sample.begin(), sample.end(), unset);
  (void)pulseinfer::detail::guess_top_k(places.data(), size, 64, sample.data());
  sample.erase(std::find(sample.begin(), sample.end(), unset), sample.end());
  REQUIRE(sample.size() >= 100);
  for (const bool best : {true, false}) {
    // The sampled keys are all above the others, or all below them.
    keys_list keys(size);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = top_k_key(1.0f, static_cast<std::int32_t>(i));
    }
    for (const std::uint64_t at : sample) {
      keys[at] = top_k_key(best ? 2.0f : 0.5f, static_cast<std::int32_t>(at));
    }
    for (const std::size_t k : {1u, 64u, 127u, 512u, 4'096u, 8'000u, 8'191u}) {
      CAPTURE(k);
      const keys_list before = keys;
      const auto guess = pulseinfer::detail::guess_top_k(
          keys.data(), size, static_cast<std::int64_t>(k), keys_list(size).data());
      if (best && k == 512) CHECK(guess.low > sorted_top_k_threshold(keys, k));
      if (!best && k == 4'096) CHECK((guess.has_high && guess.high < top_k_key(1.0f, 8'191)));
      for (const collect_function collect : collect_functions()) {
        CHECK((host_top_k(keys, k, collect) == sorted_top_k(keys, k)));
      }
      CHECK((keys == before));
    }
  }
}

TEST_CASE("top-k: 4,096 of a million") {
  constexpr std::int32_t size = 1 << 20;
  random_source draw(12);
  keys_list keys;
  for (std::int32_t i = 0; i < size; ++i) {
    keys.push_back(top_k_key(static_cast<float>(draw.below(5'000)), i));
  }
  const std::vector<std::int32_t> best = sorted_top_k(keys, 4'096);
  for (const collect_function collect : collect_functions()) {
    CHECK((host_top_k(keys, 4'096, collect) == best));
  }
}

TEST_CASE("fault 51: a row whose keys lie beyond 2^31 is found") {
  constexpr std::int64_t stride = test::far_stride;
  constexpr std::int64_t row = test::far_row;
  constexpr std::int64_t columns = 1'000;
  test::far_array<std::uint64_t> memory(row * stride + columns, row * stride);
  std::uint64_t* const keys = memory.data();
  keys_list last;
  for (std::int32_t i = 0; i < columns; ++i) {
    last.push_back(top_k_key(static_cast<float>(i * 7 % 101), i));
  }
  std::copy(last.begin(), last.end(), keys + row * stride);
  std::vector<std::int32_t> begin(row + 1, 0), end(row + 1, 0);
  end[row] = columns;
  constexpr std::int64_t k = 5;
  std::vector<std::int32_t> selected((row + 1) * k, -77), positions(columns);
  keys_list scratch(columns), thresholds(row + 1);
  const pulseinfer::top_k_keys view{keys, stride, begin.data(), end.data()};
  const std::vector<std::int32_t> best = sorted_top_k(last, k);
  const auto written = [&] {
    return std::vector<std::int32_t>(selected.end() - k, selected.end());
  };
  const pulseinfer::detail::select_top_k_row select{view,
                                                    k,
                                                    pulseinfer::detail::best_collect_keys(),
                                                    scratch.data(),
                                                    positions.data(),
                                                    selected.data(),
                                                    nullptr};
  select(row, pulseinfer::detail::single_lane{});
  CHECK((written() == best));
  std::fill(selected.begin(), selected.end(), -77);
  thresholds[row] = sorted_top_k_threshold(last, k);
  const pulseinfer::compact_top_k compact{view, k, thresholds.data(), selected.data(), nullptr};
  compact(row, pulseinfer::detail::single_lane{});
  CHECK((written() == best));
}

TEST_CASE("fault 53: scores are in a total order, NaN in it") {
  // Whatever order they come in, they leave in one: no two are equivalent and apart.
  std::vector<float> scores = interesting_scores();
  for (int i = 0; i < 20; ++i) scores.push_back(i % 2 == 0 ? not_a_number : -not_a_number);
  keys_list keys;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    keys.push_back(top_k_key(scores[i], static_cast<std::int32_t>(i)));
  }
  keys_list sorted = keys;
  std::sort(sorted.begin(), sorted.end(), std::greater<>{});
  CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
  random_source draw(4);
  for (int round = 0; round < 20; ++round) {
    keys_list shuffled = keys;
    for (std::size_t i = shuffled.size(); i > 1; --i) {
      std::swap(shuffled[i - 1], shuffled[static_cast<std::size_t>(draw.below(i))]);
    }
    std::sort(shuffled.begin(), shuffled.end(), std::greater<>{});
    CHECK((shuffled == sorted));
  }
  // The NaNs are together at the end, by their index.
  for (std::size_t i = sorted.size() - 20; i < sorted.size(); ++i) {
    CHECK(top_k_index(sorted[i]) == static_cast<std::int32_t>(i));
  }
}
