// The gradient of a 3x3 convolution's weights, of images (N, H, W, C) and gradients (N, H, W, K) in bfloat16, for
// processors that multiply pairs of bfloat16 (AVX512_BF16): d_weights (K, 3, 3, C) = sum over pixels of gradient times
// the image shifted by the tap. Such an instruction adds two products, so two neighbouring pixels are laid side by side
// first, once for even and once for odd pairs; everything after that is a product of matrices. Sums are in single
// precision from first to last.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace {

using Number = uint16_t;  // a bfloat16
constexpr int ROWS = 4, COLUMNS = 64;  // of the sums that stay in registers: output by input channels
constexpr int TILE = 32;               // output channels that are taken together
constexpr int64_t CACHED = 320 << 10;  // bytes of laid-out images at a time, which should stay in a core's second cache

struct Line { int64_t image, gradient; };  // where a row of pixels begins, in numbers

// sums (ROWS, COLUMNS) += gradients times images over the pairs of some rows of pixels.
__attribute__((noinline)) void accumulate(const Number* image, const Number* gradient, const std::vector<Line>& lines,
                                          int64_t pairs, float* sums, int64_t stride) {
  __m512 held[ROWS][4];
#pragma GCC unroll 4
  for (int k = 0; k < ROWS; ++k)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) held[k][v] = _mm512_loadu_ps(sums + k * stride + 16 * v);
  for (const Line& line : lines) {
    const Number *x = image + line.image, *g = gradient + line.gradient;
    for (const Number* end = g + pairs * ROWS * 2; g != end; x += COLUMNS * 2, g += ROWS * 2) {
      __m512bh pixels[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) pixels[v] = (__m512bh)_mm512_loadu_si512(x + 32 * v);
#pragma GCC unroll 4
      for (int k = 0; k < ROWS; ++k) {
        int32_t pair;
        std::memcpy(&pair, g + 2 * k, sizeof pair);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) held[k][v] = _mm512_dpbf16_ps(held[k][v], pixels[v], factor);
      }
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < ROWS; ++k)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(sums + k * stride + 16 * v, held[k][v]);
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
// Thirty-two channels of a pixel of a row; zeros beside the row.
inline __m512i pixel(const Number* row, int64_t column, int64_t width, int64_t channels) {
  const bool inside = column >= 0 && column < width;
  return inside ? _mm512_loadu_si512(row + column * channels) : _mm512_setzero_si512();
}
inline void store(Number* to, Pair pair) {
  _mm512_storeu_si512(to, pair.low);
  _mm512_storeu_si512(to + 32, pair.high);
}

// One image row (W, C) as even pairs of pixels (0, 1), (2, 3), ... and as odd ones (-1, 0), (1, 2), ...; blocks of
// COLUMNS channels lie even_step and odd_step apart.
void lay_image(const Number* row, int64_t W, int64_t C, Number* even, int64_t even_step, Number* odd, int64_t odd_step) {
  const int64_t pairs = (W + 1) / 2;
  for (int64_t i = 0; i <= pairs; ++i)
    for (int64_t c = 0; c < C; c += 32) {
      const int64_t block = c / COLUMNS, at = (i * COLUMNS + c % COLUMNS) * 2;
      const __m512i middle = pixel(row + c, 2 * i, W, C);
      store(odd + block * odd_step + at, paired(pixel(row + c, 2 * i - 1, W, C), middle));
      if (i < pairs) store(even + block * even_step + at, paired(middle, pixel(row + c, 2 * i + 1, W, C)));
    }
}

// TILE channels of one row of gradients (W, K) as pairs, ROWS channels at a time, which lie step apart; and their sums.
void lay_gradient(const Number* row, int64_t W, int64_t K, Number* to, int64_t step, __m512* sums) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < (W + 1) / 2; ++i) {
    const Pair pair = paired(pixel(row, 2 * i, W, K), pixel(row, 2 * i + 1, W, K));
    sums[0] = _mm512_dpbf16_ps(sums[0], (__m512bh)pair.low, ones);
    sums[1] = _mm512_dpbf16_ps(sums[1], (__m512bh)pair.high, ones);
    Number together[2 * TILE];
    store(together, pair);
    for (int q = 0; q < TILE / ROWS; ++q)
      std::memcpy(to + q * step + i * ROWS * 2, together + q * ROWS * 2, sizeof(Number) * ROWS * 2);
  }
}

// The gradients of TILE output channels from some images; d_weights (TILE, 3, 3, C) and d_bias (TILE) are overwritten.
void gradients(const Number* images, const Number* grads, int64_t N, int64_t H, int64_t W, int64_t C, int64_t K,
               float* d_weights, float* d_bias) {
  const int64_t pairs = (W + 1) / 2, odd = pairs + 1;
  // As many whole images as fit, each with room for a row above and below, or some rows of one.
  const int64_t fit = std::max<int64_t>(3, CACHED / ((pairs + odd) * C * 4));
  const int64_t together = std::max<int64_t>(1, std::min(N, fit / (H + 2)));
  const int64_t height = together > 1 ? H : std::min(H, fit - 2);
  const int64_t image_rows = together * (height + 2), rows = together * height;
  const int64_t even_step = image_rows * pairs * COLUMNS * 2, odd_step = image_rows * odd * COLUMNS * 2;
  const int64_t step = rows * pairs * ROWS * 2;
  const std::unique_ptr<Number[]> even_images(new Number[C / COLUMNS * even_step]);
  const std::unique_ptr<Number[]> odd_images(new Number[C / COLUMNS * odd_step]);
  const std::unique_ptr<Number[]> laid(new Number[TILE / ROWS * step]);
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  std::fill(d_weights, d_weights + TILE * 9 * C, 0.0f);
  std::vector<Line> lines[2][3];  // of even and odd pairs, for the row of taps above, at, and below
  for (int64_t n = 0; n < N; n += together)
    for (int64_t top = 0; top < H; top += height) {
      const int64_t count = std::min(together, N - n), tall = std::min(height, H - top);
      for (auto& of_parity : lines)
        for (auto& of_tap : of_parity) of_tap.clear();
      for (int64_t m = 0; m < count; ++m) {
        for (int64_t l = 0; l < tall + 2; ++l) {
          const int64_t h = top + l - 1, at = m * (height + 2) + l;
          if (h < 0 || h >= H) continue;
          lay_image(images + ((n + m) * H + h) * W * C, W, C, even_images.get() + at * pairs * COLUMNS * 2, even_step,
                    odd_images.get() + at * odd * COLUMNS * 2, odd_step);
        }
        for (int64_t l = 0; l < tall; ++l) {
          const int64_t at = (m * height + l) * pairs * ROWS * 2;
          lay_gradient(grads + ((n + m) * H + top + l) * W * K, W, K, laid.get() + at, step, sums);
          for (int r = 0; r < 3; ++r) {
            if (top + l + r < 1 || top + l + r > H) continue;  // zeros above and below the image
            const int64_t row = (m * (height + 2) + l + r) * COLUMNS * 2;
            lines[0][r].push_back({row * pairs, at});
            lines[1][r].push_back({row * odd, at});
          }
        }
      }
      for (int64_t block = 0; block < C / COLUMNS; ++block)
        for (int64_t q = 0; q < TILE / ROWS; ++q)
          for (int r = 0; r < 3; ++r)
            for (int s = 0; s < 3; ++s) {
              const Number* image = s == 1 ? even_images.get() + block * even_step
                                           : odd_images.get() + block * odd_step + s / 2 * COLUMNS * 2;
              accumulate(image, laid.get() + q * step, lines[s != 1][r], pairs,
                         d_weights + (q * ROWS * 9 + r * 3 + s) * C + block * COLUMNS, 9 * C);
            }
    }
  _mm512_storeu_ps(d_bias, sums[0]);
  _mm512_storeu_ps(d_bias + 16, sums[1]);
}

}  // namespace

// d_weights (parts, K, 3, 3, C) and d_bias (parts, K), still to be summed over parts; C is a multiple of 64, K of 32.
extern "C" void convolution_backward(const Number* images, const Number* grads, float* d_weights, float* d_bias,
                                     int64_t N, int64_t H, int64_t W, int64_t C, int64_t K, int64_t parts,
                                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t task = 0; task < parts * (K / TILE); ++task) {
    const int64_t part = task / (K / TILE), k = task % (K / TILE) * TILE;
    const int64_t first = N * part / parts, last = N * (part + 1) / parts;
    gradients(images + first * H * W * C, grads + first * H * W * K + k, last - first, H, W, C, K,
              d_weights + (part * K + k) * 9 * C, d_bias + part * K + k);
  }
}
extern "C" int multiplies_pairs() { return 1; }

#else

extern "C" int multiplies_pairs() { return 0; }

#endif
