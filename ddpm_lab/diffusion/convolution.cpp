// The gradient of a convolution's weights, for processors that multiply pairs of bfloat16 (AVX512_BF16). All images are
// channels-last. d_weights[s][r][c][l] is the sum over the pixels (y, x) of a small image of
// small[y][x][s] * large[stride * y + r - padding][stride * x + c - padding][l], with zeros outside. A convolution's large
// image is its input and its small one the gradient of its output; a transposed convolution's are the other way round.
// Such an instruction adds two products, so two neighbouring pixels of the small image are laid side by side first, and
// the two that a tap meets of the large one; everything after that is a product of matrices. Sums are in single precision
// from first to last.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

using Number = uint16_t;  // a bfloat16
constexpr int ROWS = 8, COLUMNS = 32;  // of the sums that stay in registers: small by large channels
constexpr int VECTORS = COLUMNS / 16;
constexpr int TILE = 32;  // small channels that are taken together
static_assert(COLUMNS == 32 && TILE == 32 && TILE % ROWS == 0, "channels are laid by the vector of 32");
constexpr int64_t CACHED = 320 << 10;  // bytes of large images laid at a time, to stay in a core's second-level cache

// Images (N, height, width, channels).
struct Images {
  const Number* numbers;
  int64_t height, width, channels;
  const Number* row(int64_t n, int64_t h) const { return numbers + (n * height + h) * width * channels; }
};
struct Taps { int64_t count, stride, padding; };
struct Line { int64_t large, small; };  // the index of a laid large row, and of the laid small row that it meets

// sums (ROWS, COLUMNS) += small times large over the pairs of some rows of pixels.
__attribute__((noinline)) void accumulate(const Number* large, int64_t length, const Number* small, int64_t pairs,
                                          const std::vector<Line>& lines, float* sums, int64_t stride) {
  __m512 held[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int k = 0; k < ROWS; ++k)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) held[k][v] = _mm512_loadu_ps(sums + k * stride + 16 * v);
  for (const Line& line : lines) {
    const Number *x = large + line.large * length * COLUMNS * 2, *g = small + line.small * pairs * ROWS * 2;
    for (const Number* end = g + pairs * ROWS * 2; g != end; x += COLUMNS * 2, g += ROWS * 2) {
      __m512bh pixels[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) pixels[v] = (__m512bh)_mm512_loadu_si512(x + 32 * v);
#pragma GCC unroll 8
      for (int k = 0; k < ROWS; ++k) {
        int32_t pair;
        std::memcpy(&pair, g + 2 * k, sizeof pair);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) held[k][v] = _mm512_dpbf16_ps(held[k][v], pixels[v], factor);
      }
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < ROWS; ++k)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + k * stride + 16 * v, held[k][v]);
}

// Thirty-two channels of two pixels, channel by channel side by side.
struct Pair { __m512i low, high; };
inline Pair paired(__m512i first, __m512i second) {
  alignas(64) static const Number low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                             8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  alignas(64) static const Number high[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                              24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  return {_mm512_permutex2var_epi16(first, _mm512_load_si512(low), second),
          _mm512_permutex2var_epi16(first, _mm512_load_si512(high), second)};
}
// Thirty-two channels, from c, of a pixel of a row; zeros beside the row.
inline __m512i pixel(const Number* row, int64_t column, const Images& of, int64_t c) {
  const bool inside = column >= 0 && column < of.width;
  return inside ? _mm512_loadu_si512(row + column * of.channels + c) : _mm512_setzero_si512();
}
inline void store(Number* to, Pair pair) {
  _mm512_storeu_si512(to, pair.low);
  _mm512_storeu_si512(to + 32, pair.high);
}

// A tap meets every stride-th pixel of a row; a layout holds these in pairs. Layout j begins at column j - padding; the tap
// j + 2 * stride reads it from its second pair on. Where a small row is odd, its last pair ends with a zero, which meets
// one pixel more of the large row: what is not finite there is seen by taps that do not reach it.
struct Layouts {
  Taps taps;
  int64_t pairs, length;  // of a small row; of a large one
  Layouts(Taps taps, int64_t width)
      : taps(taps), pairs((width + 1) / 2), length(pairs + further(taps.count - 1)) {}
  int64_t count() const { return std::min(taps.count, 2 * taps.stride); }
  int64_t of(int64_t tap) const { return tap % (2 * taps.stride); }
  int64_t further(int64_t tap) const { return tap / (2 * taps.stride); }

  // Lay one large row out; blocks of COLUMNS channels lie step numbers apart.
  void lay(const Number* row, const Images& large, int64_t layout, Number* to, int64_t step) const {
    for (int64_t i = 0, column = layout - taps.padding; i < length; ++i, column += 2 * taps.stride)
      for (int64_t c = 0; c < large.channels; c += COLUMNS)
        store(to + c / COLUMNS * step + i * COLUMNS * 2,
              paired(pixel(row, column, large, c), pixel(row, column + taps.stride, large, c)));
  }
};

// TILE channels, from k, of one small row as pairs, ROWS channels at a time, step numbers apart; and add them to
// sums.
void lay_small(const Number* row, const Images& small, int64_t k, Number* to, int64_t step, float* sums) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < (small.width + 1) / 2; ++i) {
    const Pair pair = paired(pixel(row, 2 * i, small, k), pixel(row, 2 * i + 1, small, k));
    _mm512_storeu_ps(sums, _mm512_dpbf16_ps(_mm512_loadu_ps(sums), (__m512bh)pair.low, ones));
    _mm512_storeu_ps(sums + 16, _mm512_dpbf16_ps(_mm512_loadu_ps(sums + 16), (__m512bh)pair.high, ones));
    Number together[2 * TILE];
    store(together, pair);
    for (int q = 0; q < TILE / ROWS; ++q)
      std::memcpy(to + q * step + i * ROWS * 2, together + q * ROWS * 2, sizeof(Number) * ROWS * 2);
  }
}

// The gradients of the small channels [first, last) from the images [begin, end); d_weights (.., taps, taps, L) and
// d_sums (..) of these channels are overwritten.
void gradients(const Images& large, const Images& small, Taps taps, int64_t begin, int64_t end, int64_t first,
               int64_t last, float* d_weights, float* d_sums) {
  const Layouts layouts(taps, small.width);
  const int64_t H = small.height, L = large.channels, pairs = layouts.pairs, length = layouts.length;
  // As many whole images as fit are laid together, each with the rows that taps reach, or a window of one: fit, reach and
  // deep count large rows, of the cache, an image and a window; height the small rows of a window.
  const int64_t fit = CACHED / (layouts.count() * length * L * 4), reach = taps.stride * (H - 1) + taps.count;
  const int64_t together = std::max<int64_t>(1, std::min(end - begin, fit / reach));
  const int64_t height = std::min(H, fit < reach ? std::max<int64_t>(0, fit - taps.count) / taps.stride + 1 : H);
  const int64_t deep = taps.stride * (height - 1) + taps.count;
  const int64_t step = together * deep * length * COLUMNS * 2, small_step = together * height * pairs * ROWS * 2;
  const std::unique_ptr<Number[]> laid(new Number[layouts.count() * (L / COLUMNS) * step]);
  const std::unique_ptr<Number[]> laid_small(new Number[TILE / ROWS * small_step]);
  std::vector<std::vector<Line>> lines(taps.count);  // for each row of taps
  const int64_t row_size = taps.count * taps.count * L;
  std::fill(d_weights, d_weights + (last - first) * row_size, 0.0f);
  std::fill(d_sums, d_sums + last - first, 0.0f);
  for (int64_t n = begin; n < end; n += together)
    for (int64_t top = 0; top < H; top += height) {
      const int64_t count = std::min(together, end - n), tall = std::min(height, H - top);
      for (auto& of_tap : lines) of_tap.clear();
      for (int64_t m = 0; m < count; ++m)
        for (int64_t l = 0; l < taps.stride * (tall - 1) + taps.count; ++l) {
          const int64_t h = taps.stride * top + l - taps.padding, at = m * deep + l;
          if (h < 0 || h >= large.height) continue;  // zeros above and below the image
          for (int64_t layout = 0; layout < layouts.count(); ++layout)
            layouts.lay(large.row(n + m, h), large, layout,
                        laid.get() + layout * (L / COLUMNS) * step + at * length * COLUMNS * 2, step);
          for (int64_t r = l % taps.stride; r <= std::min(l, taps.count - 1); r += taps.stride)
            if ((l - r) / taps.stride < tall) lines[r].push_back({at, m * height + (l - r) / taps.stride});
        }
      for (int64_t k = first; k < last; k += TILE) {
        for (int64_t m = 0; m < count; ++m)
          for (int64_t l = 0; l < tall; ++l)
            lay_small(small.row(n + m, top + l), small, k, laid_small.get() + (m * height + l) * pairs * ROWS * 2,
                      small_step, d_sums + k - first);
        for (int64_t block = 0; block < L / COLUMNS; ++block)
          for (int64_t q = 0; q < TILE / ROWS; ++q)
            for (int64_t r = 0; r < taps.count; ++r)
              for (int64_t s = 0; s < taps.count; ++s)
                accumulate(laid.get() + (layouts.of(s) * (L / COLUMNS) + block) * step +
                               layouts.further(s) * COLUMNS * 2,
                           length, laid_small.get() + q * small_step, pairs, lines[r],
                           d_weights + (k - first + q * ROWS) * row_size + (r * taps.count + s) * L + block * COLUMNS,
                           row_size);
      }
    }
}

}  // namespace

// d_weights (parts, S, taps, taps, L) and d_sums (parts, S), the sums of the small images, still to be summed over
// parts; L and S are multiples of 32.
extern "C" void weights_gradient(const Number* large, const Number* small, float* d_weights, float* d_sums, int64_t N,
                                 int64_t large_height, int64_t large_width, int64_t L, int64_t small_height,
                                 int64_t small_width, int64_t S, int64_t taps, int64_t stride, int64_t padding,
                                 int64_t parts, int threads) {
  const int64_t tiles = S / TILE, shares = std::min<int64_t>(tiles, (threads + parts - 1) / parts);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t task = 0; task < parts * shares; ++task) {
    const int64_t part = task / shares, share = task % shares;
    const int64_t first = tiles * share / shares * TILE, last = tiles * (share + 1) / shares * TILE;
    gradients({large, large_height, large_width, L}, {small, small_height, small_width, S}, {taps, stride, padding},
              N * part / parts, N * (part + 1) / parts, first, last,
              d_weights + (part * S + first) * taps * taps * L, d_sums + part * S + first);
  }
}
extern "C" int multiplies_pairs() { return 1; }

#else

extern "C" int multiplies_pairs() { return 0; }

#endif
