// Normalisation joined with what follows it, over images (N, P, C): P pixels of C channels, channels last.
// One image stays in a core's cache while it is read again, so memory is read and written once. All arithmetic is in
// single precision; T is how images are stored. No header of torch is needed: the caller passes addresses.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

struct bfloat16 { uint16_t bits; };

// One register of numbers. Of wider vectors the compiler keeps every step in memory, and compares lane by lane.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
// Vectors taken side by side, whose sums stay in registers: there are 32 of the widest, and 16 of the others.
constexpr int ABREAST = WIDTH == 16 ? 4 : 2;
constexpr int SUMS = 4 * ABREAST;
inline Lanes& lanes(float* p) { return *reinterpret_cast<Lanes*>(p); }
inline const Lanes& lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline Lanes load_lanes(const float* p) { return lanes(p); }
inline Lanes load_lanes(const bfloat16* p) {
#ifdef __AVX512F__  // what compilers make of the line below is four instructions
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#else
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Whole) << 16);
#endif
}
inline void store_lanes(float* p, Lanes v) { lanes(p) = v; }
inline void store_lanes(bfloat16* p, Lanes v) {  // round to nearest, ties to even
#ifdef __AVX512BF16__
  const auto rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const Whole u = (Whole)v;
  *reinterpret_cast<Halves*>(p) = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, Halves);
#endif
}
// The same step for each of V vectors: a processor looks ahead too few instructions to find them where each vector takes
// all of its steps first.
#define EACH(V) _Pragma("GCC unroll 8") for (int i = 0; i < V; ++i)
// exp(x) to about two units in the last place (Cody and Waite 1980, chapter 6), in place.
template <int V>
inline void exponentials(Lanes (&x)[V]) {
  Lanes n[V], p[V];
#ifdef __AVX512F__
  EACH(V) x[i] = (Lanes)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x[i]);  // of NaN and another, the second
  EACH(V) x[i] = (Lanes)_mm512_min_ps(_mm512_set1_ps(87.0f), (__m512)x[i]);
  EACH(V) n[i] = x[i] * 1.44269504f;
  EACH(V) n[i] = (Lanes)_mm512_roundscale_ps((__m512)n[i], 0);
#else
  Whole bits[V];
  EACH(V) x[i] = x[i] < -87.0f ? Lanes{} - 87.0f : x[i];
  EACH(V) x[i] = x[i] > 87.0f ? Lanes{} + 87.0f : x[i];
  EACH(V) n[i] = x[i] * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  EACH(V) bits[i] = (Whole)n[i];
  EACH(V) n[i] -= 12582912.0f;
#endif
  EACH(V) x[i] = x[i] - n[i] * 0.693359375f;
  EACH(V) x[i] = x[i] + n[i] * 2.12194440e-4f;
  EACH(V) p[i] = x[i] * 1.9875691500e-4f + 1.3981999507e-3f;
  EACH(V) p[i] = p[i] * x[i] + 8.3334519073e-3f;
  EACH(V) p[i] = p[i] * x[i] + 4.1665795894e-2f;
  EACH(V) p[i] = p[i] * x[i] + 1.6666665459e-1f;
  EACH(V) p[i] = p[i] * x[i] + 5.0000001201e-1f;
  EACH(V) p[i] = p[i] * x[i];
  EACH(V) x[i] = p[i] * x[i] + x[i];
  EACH(V) x[i] = x[i] + 1.0f;
#ifdef __AVX512F__
  EACH(V) x[i] = (Lanes)_mm512_scalef_ps((__m512)x[i], (__m512)n[i]);
#else
  EACH(V) x[i] = x[i] * (Lanes)((bits[i] << 23) + 0x3f800000);
#endif
}
template <int V>
inline void sigmoids(const Lanes (&z)[V], Lanes (&out)[V]) {
  EACH(V) out[i] = -z[i];
  exponentials(out);
  EACH(V) out[i] = 1.0f + out[i];
#ifdef __AVX512F__
  Lanes guess[V];
  EACH(V) guess[i] = (Lanes)_mm512_rcp14_ps((__m512)out[i]);  // and one of Newton's steps, which doubles its digits
  EACH(V) out[i] = 2.0f - out[i] * guess[i];
  EACH(V) out[i] = out[i] * guess[i];
#else
  EACH(V) out[i] = 1.0f / out[i];
#endif
}
template <int BY, int... I>
inline Lanes exchanged(Lanes v, std::integer_sequence<int, I...>) { return __builtin_shuffle(v, Whole{(I ^ BY)...}); }
// The lanes joined in pairs until one is left.
template <int BY = WIDTH / 2, typename F>
inline float joined(Lanes v, F&& join) {
  if constexpr (BY == 0) return v[0];
  else return joined<BY / 2>(join(v, exchanged<BY>(v, std::make_integer_sequence<int, WIDTH>())), join);
}
inline float sum_lanes(Lanes v) { return joined(v, [](Lanes a, Lanes b) { return a + b; }); }
inline float max_lanes(Lanes v) { return joined(v, [](Lanes a, Lanes b) { return a > b ? a : b; }); }

// Channels, of which there is a multiple of WIDTH, are taken in runs: vectors abreast, whose sums stay in registers over
// all pixels, then one vector at a time. f gets the number of vectors, as a type, and the first channel.
template <typename F>
inline void runs(int64_t C, F&& f) {
  int64_t c = 0;
  for (; c + ABREAST * WIDTH <= C; c += ABREAST * WIDTH) f(std::integral_constant<int, ABREAST>{}, c);
  for (; c < C; c += WIDTH) f(std::integral_constant<int, 1>{}, c);
}

// Mean and 1 / standard deviation of each channel's group, of x + before, which is (C). Every channel is summed relative
// to its first pixel, and the channels are joined as in Chan et al. 1979, so that a large mean costs no digits.
template <typename T>
void moments(const T* x, const float* before, int64_t P, int64_t C, int64_t G, float eps, float* mean, float* rstd,
             float* room) {
  float *of_channel = room, *squares = room + C;
  runs(C, [&](auto vectors, int64_t c) {
    constexpr int V = decltype(vectors)::value;
    Lanes first[V], s1[V] = {}, s2[V] = {};
    for (int i = 0; i < V; ++i) first[i] = load_lanes(x + c + WIDTH * i);
    for (int64_t p = 1; p < P; ++p)
      for (int i = 0; i < V; ++i) {
        const Lanes v = load_lanes(x + p * C + c + WIDTH * i) - first[i];
        s1[i] += v;
        s2[i] += v * v;
      }
    for (int i = 0; i < V; ++i) {
      lanes(of_channel + c + WIDTH * i) = first[i] + s1[i] / static_cast<float>(P);
      lanes(squares + c + WIDTH * i) = s2[i] - s1[i] * s1[i] / static_cast<float>(P);
    }
  });
  if (before)
    for (int64_t c = 0; c < C; ++c) of_channel[c] += before[c];
  const int64_t D = C / G;
  for (int64_t g = 0; g < G; ++g) {
    float m = 0.0f, m2 = 0.0f;
    for (int64_t c = g * D; c < (g + 1) * D; ++c) m += of_channel[c];
    m /= D;
    for (int64_t c = g * D; c < (g + 1) * D; ++c) m2 += squares[c] + P * (of_channel[c] - m) * (of_channel[c] - m);
    const float r = 1.0f / std::sqrt(std::max(m2, 0.0f) / (P * D) + eps);
    for (int64_t c = g * D; c < (g + 1) * D; ++c) { mean[c] = before ? m - before[c] : m; rstd[c] = r; }
  }
}

// y = f(norm(x + before) * gain + bias) + residual, with (gain, bias) scaled by 1 + scale and shifted by shift where
// given, and f SiLU or the identity. before is (N, C), scale_shift (N, 2 C). mean, less before, and rstd are (N, C) for
// the backward pass.
template <typename T, bool SILU>
void group_forward(const T* x, const float* gain, const float* bias, const float* before, const float* scale_shift,
                   const T* residual, T* y, float* mean, float* rstd, int64_t N, int64_t P, int64_t C, int64_t G,
                   float eps, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(4 * C);
    float *a = room.data() + 2 * C, *b = a + C;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      const T* in = x + n * P * C;
      const T* more = residual ? residual + n * P * C : nullptr;
      T* out = y + n * P * C;
      float *m = mean + n * C, *r = rstd + n * C;
      moments(in, before ? before + n * C : nullptr, P, C, G, eps, m, r, room.data());
      for (int64_t c = 0; c < C; ++c) {
        const float s = scale_shift ? scale_shift[n * 2 * C + c] + 1.0f : 1.0f;
        const float t = scale_shift ? scale_shift[n * 2 * C + C + c] : 0.0f;
        a[c] = r[c] * gain[c] * s;
        b[c] = bias[c] * s + t - m[c] * a[c];
      }
      runs(C, [&](auto vectors, int64_t c) {
        constexpr int V = decltype(vectors)::value;
        Lanes slope[V], offset[V];
        for (int i = 0; i < V; ++i) { slope[i] = lanes(a + c + WIDTH * i); offset[i] = lanes(b + c + WIDTH * i); }
        for (int64_t p = 0; p < P; ++p) {
          const int64_t at = p * C + c;
          Lanes z[V], g[V];
          EACH(V) z[i] = load_lanes(in + at + WIDTH * i) * slope[i] + offset[i];
          if (SILU) {
            sigmoids(z, g);
            EACH(V) z[i] *= g[i];
          }
          if (more) EACH(V) z[i] += load_lanes(more + at + WIDTH * i);
          EACH(V) store_lanes(out + at + WIDTH * i, z[i]);
        }
      });
    }
  }
}

// The gradients of group_forward. d_gain and d_bias are (N, C), still to be summed over N; d_before is (N, C) where it
// is asked for, and d_scale_shift (N, 2 C).
template <typename T, bool SILU>
void group_backward(const T* dy, const T* x, const float* gain, const float* bias, const float* scale_shift,
                    const float* mean, const float* rstd, T* dx, float* d_gain, float* d_bias, float* d_before,
                    float* d_scale_shift, int64_t N, int64_t P, int64_t C, int64_t G, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t D = C / G;
    std::vector<float> held(P * C), room(8 * C);
    float *dz = held.data(), *a = room.data(), *b = a + C, *k = b + C, *s0 = k + C, *s1 = s0 + C, *u = s1 + C,
          *w = u + C, *sum = w + C;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      const T *in = x + n * P * C, *grad = dy + n * P * C;
      T* out = dx + n * P * C;
      const float *m = mean + n * C, *r = rstd + n * C;
      for (int64_t c = 0; c < C; ++c) {
        const float s = scale_shift ? scale_shift[n * 2 * C + c] + 1.0f : 1.0f;
        const float t = scale_shift ? scale_shift[n * 2 * C + C + c] : 0.0f;
        k[c] = gain[c] * s;  // dz/d(normalised x)
        a[c] = r[c] * k[c];
        b[c] = bias[c] * s + t - m[c] * a[c];
      }
      runs(C, [&](auto vectors, int64_t c) {
        constexpr int V = decltype(vectors)::value;
        Lanes slope[V], offset[V], middle[V], plain[V] = {}, along[V] = {};
        for (int i = 0; i < V; ++i) {
          slope[i] = lanes(a + c + WIDTH * i);
          offset[i] = lanes(b + c + WIDTH * i);
          middle[i] = load_lanes(m + c + WIDTH * i);
        }
        for (int64_t p = 0; p < P; ++p) {
          const int64_t at = p * C + c;
          Lanes d[V], v[V], z[V], g[V];
          EACH(V) v[i] = load_lanes(in + at + WIDTH * i);
          EACH(V) d[i] = load_lanes(grad + at + WIDTH * i);
          if (SILU) {
            EACH(V) z[i] = v[i] * slope[i] + offset[i];
            sigmoids(z, g);
            EACH(V) z[i] = z[i] * (1.0f - g[i]) + 1.0f;
            EACH(V) d[i] *= g[i] * z[i];
          }
          EACH(V) lanes(dz + p * C + c + WIDTH * i) = d[i];
          EACH(V) plain[i] += d[i];
          EACH(V) along[i] += d[i] * (v[i] - middle[i]);
        }
        for (int i = 0; i < V; ++i) { lanes(s0 + c + WIDTH * i) = plain[i]; lanes(s1 + c + WIDTH * i) = along[i]; }
      });
      for (int64_t c = 0; c < C; ++c) s1[c] *= r[c];
      for (int64_t g = 0; g < G; ++g) {
        float plain = 0.0f, along = 0.0f;
        for (int64_t c = g * D; c < (g + 1) * D; ++c) { plain += k[c] * s0[c]; along += k[c] * s1[c]; }
        plain /= P * D;
        along /= P * D;
        for (int64_t c = g * D; c < (g + 1) * D; ++c) {  // dx = a dz - u - w x, with xhat = (x - m) r written out
          w[c] = r[c] * r[c] * along;
          u[c] = r[c] * plain - w[c] * m[c];
        }
      }
      runs(C, [&](auto vectors, int64_t c) {
        constexpr int V = decltype(vectors)::value;
        Lanes slope[V], offset[V], share[V], sums[V] = {};
        for (int i = 0; i < V; ++i) {
          slope[i] = lanes(a + c + WIDTH * i);
          offset[i] = lanes(u + c + WIDTH * i);
          share[i] = lanes(w + c + WIDTH * i);
        }
        for (int64_t p = 0; p < P; ++p)
          for (int i = 0; i < V; ++i) {
            const int64_t at = c + WIDTH * i;
            const Lanes d = lanes(dz + p * C + at) * slope[i] - offset[i] - load_lanes(in + p * C + at) * share[i];
            sums[i] += d;
            store_lanes(out + p * C + at, d);
          }
        for (int i = 0; i < V; ++i) lanes(sum + c + WIDTH * i) = sums[i];
      });
      if (d_before) std::copy(sum, sum + C, d_before + n * C);
      for (int64_t c = 0; c < C; ++c) {
        const float s = scale_shift ? scale_shift[n * 2 * C + c] + 1.0f : 1.0f;
        d_gain[n * C + c] = s1[c] * s;
        d_bias[n * C + c] = s0[c] * s;
        if (scale_shift) {
          d_scale_shift[n * 2 * C + c] = s1[c] * gain[c] + s0[c] * bias[c];
          d_scale_shift[n * 2 * C + C + c] = s0[c];
        }
      }
    }
  }
}

// y = LayerNorm over the last axis of x (rows, C), plus residual where given; mean and rstd are (rows,).
template <typename T>
void layer_forward(const T* x, const float* gain, const float* bias, const T* residual, T* y, float* mean, float* rstd,
                   int64_t rows, int64_t C, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i) {
    const T* in = x + i * C;
    T* out = y + i * C;
    Lanes sums = {}, squares = {};
    for (int64_t c = 0; c < C; c += WIDTH) sums += load_lanes(in + c);
    const float m = sum_lanes(sums) / C;
    for (int64_t c = 0; c < C; c += WIDTH) {
      const Lanes d = load_lanes(in + c) - m;
      squares += d * d;
    }
    const float r = 1.0f / std::sqrt(sum_lanes(squares) / C + eps);
    mean[i] = m;
    rstd[i] = r;
    for (int64_t c = 0; c < C; c += WIDTH) {
      Lanes z = (load_lanes(in + c) - m) * r * lanes(gain + c) + lanes(bias + c);
      if (residual) z += load_lanes(residual + i * C + c);
      store_lanes(out + c, z);
    }
  }
}

// The gradients of layer_forward. d_gain and d_bias are (threads, C), still to be summed.
template <typename T>
void layer_backward(const T* dy, const T* x, const float* gain, const float* mean, const float* rstd, T* dx,
                    float* d_gain, float* d_bias, int64_t rows, int64_t C, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    std::vector<float> room(2 * C);
    float *dg = room.data(), *db = dg + C;
    for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; ++i) {
      const T *in = x + i * C, *grad = dy + i * C;
      T* out = dx + i * C;
      const float m = mean[i], r = rstd[i];
      Lanes sums = {}, products = {};
      for (int64_t c = 0; c < C; c += WIDTH) {
        const Lanes d = load_lanes(grad + c), h = (load_lanes(in + c) - m) * r, along = d * lanes(gain + c);
        lanes(dg + c) += d * h;
        lanes(db + c) += d;
        sums += along;
        products += along * h;
      }
      const float plain = sum_lanes(sums) / C, along = sum_lanes(products) / C;
      for (int64_t c = 0; c < C; c += WIDTH) {
        const Lanes h = (load_lanes(in + c) - m) * r;
        store_lanes(out + c, r * (load_lanes(grad + c) * lanes(gain + c) - plain - h * along));
      }
    }
    std::copy(dg, dg + C, d_gain + part * C);
    std::copy(db, db + C, d_bias + part * C);
  }
}

// Tokens are taken TILE at a time, so that what is computed of them stays in the first cache, and all heads of a tile
// before the next one: a token's heads lie side by side, and a head alone would use two cache lines of every twelve.
constexpr int TILE = 32, HEAD = 32;  // tokens of a tile, and the width of a head
using Tile = float[TILE][HEAD];
using Square = float[HEAD][HEAD];

// Zeros for the rows beyond the last token.
inline void clear(Tile& tile, int count) {
  if (count < TILE) std::memset(tile[count], 0, sizeof(float) * HEAD * (TILE - count));
}

// exp of all rows of a tile.
inline void exponentials(Tile& tile) {
  for (float* at = tile[0]; at < tile[0] + TILE * HEAD; at += ABREAST * WIDTH) {
    Lanes x[ABREAST];
    EACH(ABREAST) x[i] = lanes(at + WIDTH * i);
    exponentials(x);
    EACH(ABREAST) lanes(at + WIDTH * i) = x[i];
  }
}

// out = m1 m2 with SUMS vectors of sums in registers at a time, of K terms each; first(i, k) is an element of m1.
template <int K, bool ADD, typename F>
inline void product(int height, F&& first, const float (*m2)[HEAD], float (*out)[HEAD]) {
  constexpr int V = HEAD / WIDTH, R = std::min(8, std::max(1, SUMS / V));
  for (int i = 0; i < height; i += R) {
    Lanes sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = ADD ? lanes(out[i + r] + WIDTH * v) : Lanes{};
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float factor = first(i + r, k);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] += factor * lanes(m2[k] + WIDTH * v);
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) lanes(out[i + r] + WIDTH * v) = sums[r][v];
  }
}

// square += a^T b over the rows of a tile.
inline void outer(const Tile& a, const Tile& b, Square& square) {
  product<TILE, true>(HEAD, [&](int d, int j) { return a[j][d]; }, b, square);
}

// out = a m for the rows of a tile.
inline void times(const Tile& a, const Square& m, Tile& out) {
  product<HEAD, false>(TILE, [&](int j, int d) { return a[j][d]; }, m, out);
}

// Asks for the row of a later tile: the processor does not guess that far across the other heads.
template <typename T>
inline void ahead(const T* row) {
  for (int d = 0; d < HEAD; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// A tile as it lies in memory.
template <typename T>
inline void read(const T* from, int64_t stride, int count, Tile& out) {
  for (int j = 0; j < count; ++j) {
    ahead(from + (j + TILE) * stride);
    for (int d = 0; d < HEAD; d += WIDTH) lanes(out[j] + d) = load_lanes(from + j * stride + d);
  }
  clear(out, count);
}

// Linear attention (Shen et al. 2021) of H heads of one image, from tokens (L, stride) whose queries, keys and values
// of all heads lie side by side: out = softmax_channels(q) / sqrt(HEAD) times softmax_positions(k)^T v. Left for the
// backward pass are the keys' largest values and sums of exponentials, top and sum (H, HEAD), contexts
// (H, HEAD, HEAD), which are softmax(k)^T v, and levels (H, L, 2): exp(q - first) * second is the softmax of a query
// divided by sqrt(HEAD).
template <typename T>
void attend(const T* q, const T* k, const T* v, T* out, int64_t L, int64_t H, int64_t stride, int64_t out_stride,
            float* top, float* sum, float* contexts, float* levels) {
  Tile key, value;
  std::fill(contexts, contexts + H * HEAD * HEAD, 0.0f);
  std::fill(sum, sum + H * HEAD, 0.0f);
  for (int64_t c = 0; c < H * HEAD; c += WIDTH) lanes(top + c) = load_lanes(k + c);
  for (int64_t l = 0; l < L; l += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, L - l));
    for (int64_t h = 0; h < H; ++h) {
      Square& context = reinterpret_cast<Square*>(contexts)[h];
      float *most = top + h * HEAD, *total = sum + h * HEAD;
      read(v + l * stride + h * HEAD, stride, count, value);
      read(k + l * stride + h * HEAD, stride, count, key);
      float factors[HEAD];
      for (int d = 0; d < HEAD; d += WIDTH) {
        Lanes now = lanes(most + d);
        for (int j = 0; j < count; ++j) now = lanes(key[j] + d) > now ? lanes(key[j] + d) : now;
        for (int j = 0; j < count; ++j) lanes(key[j] + d) -= now;
        Lanes change[1] = {lanes(most + d) - now};
        exponentials(change);
        lanes(factors + d) = change[0];
        lanes(most + d) = now;
      }
      exponentials(key);
      clear(key, count);
      for (int d = 0; d < HEAD; d += WIDTH) {
        // Where a key is larger than any before, what was summed is relative to the old one.
        const Lanes factor = lanes(factors + d);
        Lanes all = lanes(total + d) * factor;
        for (int j = 0; j < count; ++j) all += lanes(key[j] + d);
        lanes(total + d) = all;
        if (sum_lanes(factor) != WIDTH)
          for (int i = 0; i < WIDTH; ++i)
            for (int e = 0; e < HEAD; e += WIDTH) lanes(context[d + i] + e) *= factor[i];
      }
      outer(key, value, context);
    }
  }
  for (int64_t c = 0; c < H * HEAD; ++c)
    for (int e = 0; e < HEAD; ++e) contexts[c * HEAD + e] /= sum[c];
  for (int64_t l = 0; l < L; l += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, L - l));
    for (int64_t h = 0; h < H; ++h) {
      read(q + l * stride + h * HEAD, stride, count, key);
      for (int j = 0; j < count; ++j) {
        Lanes most = lanes(key[j]);
        for (int d = WIDTH; d < HEAD; d += WIDTH) most = lanes(key[j] + d) > most ? lanes(key[j] + d) : most;
        const float least = max_lanes(most);
        levels[2 * (h * L + l + j)] = least;
        for (int d = 0; d < HEAD; d += WIDTH) lanes(key[j] + d) -= least;
      }
      exponentials(key);
      for (int j = 0; j < count; ++j) {
        Lanes total = {};
        for (int d = 0; d < HEAD; d += WIDTH) total += lanes(key[j] + d);
        const float factor = 1.0f / (sum_lanes(total) * std::sqrt(static_cast<float>(HEAD)));
        levels[2 * (h * L + l + j) + 1] = factor;
        for (int d = 0; d < HEAD; d += WIDTH) lanes(key[j] + d) *= factor;
      }
      times(key, reinterpret_cast<const Square*>(contexts)[h], value);
      for (int j = 0; j < count; ++j)
        for (int e = 0; e < HEAD; e += WIDTH)
          store_lanes(out + (l + j) * out_stride + h * HEAD + e, lanes(value[j] + e));
    }
  }
}

// The gradients of attend, written where q, k and v stand in an array of the same shape.
template <typename T>
void attend_backward(const T* dout, const T* q, const T* k, const T* v, T* dq, T* dk, T* dv, int64_t L, int64_t H,
                     int64_t stride, int64_t out_stride, const float* top, const float* sum, const float* contexts,
                     const float* levels) {
  constexpr int V = HEAD / WIDTH;
  struct Head { Square d_context, d_turned, turned; float inner[HEAD], share[HEAD]; };
  std::vector<Head> heads(H);
  Tile query, key, value, grad, d_query, d_key, d_value;
  auto queries = [&](int64_t l, int64_t h, int count) {
    const float* level = levels + 2 * (h * L + l);
    for (int j = 0; j < count; ++j) {
      const T* from = q + (l + j) * stride + h * HEAD;
      ahead(from + TILE * stride);
      Lanes x[V];
      EACH(V) x[i] = load_lanes(from + WIDTH * i) - level[2 * j];
      exponentials(x);
      EACH(V) lanes(query[j] + WIDTH * i) = x[i] * level[2 * j + 1];
    }
    clear(query, count);
    read(dout + l * out_stride + h * HEAD, out_stride, count, grad);
  };
  for (int64_t l = 0; l < L; l += TILE)
    for (int64_t h = 0; h < H; ++h) {
      queries(l, h, static_cast<int>(std::min<int64_t>(TILE, L - l)));
      outer(query, grad, heads[h].d_context);
    }
  for (int64_t h = 0; h < H; ++h) {
    Head& head = heads[h];
    const Square& context = reinterpret_cast<const Square*>(contexts)[h];
    for (int d = 0; d < HEAD; ++d) {
      head.share[d] = 1.0f / sum[h * HEAD + d];
      for (int e = 0; e < HEAD; ++e) {
        head.turned[e][d] = context[d][e];
        head.d_turned[e][d] = head.d_context[d][e];
        head.inner[d] += context[d][e] * head.d_context[d][e];  // sum over positions of key times its gradient
      }
    }
  }
  for (int64_t l = 0; l < L; l += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, L - l));
    for (int64_t h = 0; h < H; ++h) {
      const Head& head = heads[h];
      const int64_t at = l * stride + h * HEAD;
      const float* most = top + h * HEAD;
      queries(l, h, count);
      for (int j = 0; j < count; ++j) {
        const T* from = k + at + j * stride;
        ahead(from + TILE * stride);
        Lanes x[V];
        EACH(V) x[i] = load_lanes(from + WIDTH * i) - lanes(most + WIDTH * i);
        exponentials(x);
        EACH(V) lanes(key[j] + WIDTH * i) = x[i] * lanes(head.share + WIDTH * i);
      }
      clear(key, count);
      read(v + at, stride, count, value);
      times(grad, head.turned, d_query);
      times(value, head.d_turned, d_key);
      times(key, head.d_context, d_value);
      for (int j = 0; j < count; ++j) {
        Lanes sums = {};
        for (int d = 0; d < HEAD; d += WIDTH) sums += lanes(query[j] + d) * lanes(d_query[j] + d);
        // The query holds the factor 1 / sqrt(HEAD) once too often.
        const float along = sum_lanes(sums) * std::sqrt(static_cast<float>(HEAD));
        const int64_t token = at + j * stride;
        for (int d = 0; d < HEAD; d += WIDTH) {
          store_lanes(dq + token + d, lanes(query[j] + d) * (lanes(d_query[j] + d) - along));
          store_lanes(dk + token + d, lanes(key[j] + d) * (lanes(d_key[j] + d) - lanes(head.inner + d)));
          store_lanes(dv + token + d, lanes(d_value[j] + d));
        }
      }
    }
  }
}

// Heads that a thread takes together: all of an image, unless there are fewer images than threads.
inline int64_t together(int64_t N, int64_t H, int threads) { return N >= threads ? H : 1; }

template <typename T>
void attention(const T* qkv, T* out, float* top, float* sum, float* contexts, float* levels, int64_t N, int64_t L,
               int64_t H, int threads) {
  const int64_t inner = H * HEAD, some = together(N, H, threads);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; h += some) {
      const T* at = qkv + n * L * 3 * inner + h * HEAD;
      const int64_t keys = (n * H + h) * HEAD;
      attend(at, at + inner, at + 2 * inner, out + n * L * inner + h * HEAD, L, some, 3 * inner, inner, top + keys,
             sum + keys, contexts + keys * HEAD, levels + 2 * (n * H + h) * L);
    }
}

template <typename T>
void attention_backward(const T* dout, const T* qkv, T* d_qkv, const float* top, const float* sum,
                        const float* contexts, const float* levels, int64_t N, int64_t L, int64_t H, int threads) {
  const int64_t inner = H * HEAD, some = together(N, H, threads);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; h += some) {
      const int64_t at = n * L * 3 * inner + h * HEAD, keys = (n * H + h) * HEAD;
      const T* in = qkv + at;
      T* back = d_qkv + at;
      attend_backward(dout + n * L * inner + h * HEAD, in, in + inner, in + 2 * inner, back, back + inner,
                      back + 2 * inner, L, some, 3 * inner, inner, top + keys, sum + keys, contexts + keys * HEAD,
                      levels + 2 * (n * H + h) * L);
    }
}

}  // namespace

// What Python calls, by number format: the addresses of functions.
#define KERNELS(NAME, T)                                          \
  auto* group_forward_##NAME = &group_forward<T, false>;          \
  auto* group_forward_silu_##NAME = &group_forward<T, true>;      \
  auto* group_backward_##NAME = &group_backward<T, false>;        \
  auto* group_backward_silu_##NAME = &group_backward<T, true>;    \
  auto* layer_forward_##NAME = &layer_forward<T>;                 \
  auto* layer_backward_##NAME = &layer_backward<T>;               \
  auto* attention_forward_##NAME = &attention<T>;                 \
  auto* attention_backward_##NAME = &attention_backward<T>;
extern "C" {
KERNELS(float32, float)
KERNELS(bfloat16, bfloat16)
}

// The gradient of a convolution's weights, for processors that multiply pairs of bfloat16 (AVX512_BF16). All images are
// channels-last. d_weights[s][r][c][l] is the sum over the pixels (y, x) of a small image of
// small[y][x][s] * large[stride * y + r - padding][stride * x + c - padding][l], with zeros outside. A convolution's large
// image is its input and its small one the gradient of its output; a transposed convolution's are the other way round.
// Such an instruction adds two products, so two neighbouring pixels of the small image are laid side by side first, and
// the two that a tap meets of the large one; everything after that is a product of matrices. Sums are in single precision
// from first to last.

#ifdef __AVX512BF16__
namespace convolution {
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
    EACH(VECTORS) held[k][i] = _mm512_loadu_ps(sums + k * stride + 16 * i);
  for (const Line& line : lines) {
    const Number *x = large + line.large * length * COLUMNS * 2, *g = small + line.small * pairs * ROWS * 2;
    for (const Number* end = g + pairs * ROWS * 2; g != end; x += COLUMNS * 2, g += ROWS * 2) {
      __m512bh pixels[VECTORS];
      EACH(VECTORS) pixels[i] = (__m512bh)_mm512_loadu_si512(x + 32 * i);
#pragma GCC unroll 8
      for (int k = 0; k < ROWS; ++k) {
        int32_t pair;
        std::memcpy(&pair, g + 2 * k, sizeof pair);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
        EACH(VECTORS) held[k][i] = _mm512_dpbf16_ps(held[k][i], pixels[i], factor);
      }
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < ROWS; ++k)
    EACH(VECTORS) _mm512_storeu_ps(sums + k * stride + 16 * i, held[k][i]);
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

// d_weights (parts, S, taps, taps, L) and d_sums (parts, S), the sums of the small images, still to be summed over
// parts; L and S are multiples of 32.
void weights_gradient(const Number* large, const Number* small, float* d_weights, float* d_sums, int64_t N,
                      int64_t large_height, int64_t large_width, int64_t L, int64_t small_height, int64_t small_width,
                      int64_t S, int64_t taps, int64_t stride, int64_t padding, int64_t parts, int threads) {
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

}  // namespace
}  // namespace convolution

extern "C" {
auto* weights_gradient = &convolution::weights_gradient;
}
#endif
