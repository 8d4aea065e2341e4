// Normalisation joined with what follows it, over images (N, P, C): P pixels of C channels, channels last.
// One image stays in a core's cache while it is read again, so memory is read and written once. All arithmetic is in
// single precision; T is how images are stored. No header of torch is needed: the caller passes addresses.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 { uint16_t bits; };

inline float load(const float* p) { return *p; }
inline void store(float* p, float v) { *p = v; }
inline float load(const bfloat16* p) {
  uint32_t u = static_cast<uint32_t>(p->bits) << 16;
  float v;
  std::memcpy(&v, &u, 4);
  return v;
}
inline void store(bfloat16* p, float v) {  // round to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &v, 4);
  p->bits = static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// exp(x) to about two units in the last place, in a form that compilers vectorise (Cody and Waite 1980, chapter 6).
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  float n = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  int32_t bits;
  std::memcpy(&bits, &n, 4);
  n -= 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  bits = (bits << 23) + 0x3f800000;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}
inline float sigmoid(float z) { return 1.0f / (1.0f + exponential(-z)); }

// Sixteen numbers at once, however many registers that takes on this processor. Left to itself the compiler takes sums
// and largest values over channels apart, lane by lane.
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Whole __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
inline Lanes& lanes(float* p) { return *reinterpret_cast<Lanes*>(p); }
inline const Lanes& lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline Lanes load16(const float* p) { return lanes(p); }
inline Lanes load16(const bfloat16* p) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Whole) << 16);
}
inline void store16(float* p, Lanes v) { lanes(p) = v; }
inline void store16(bfloat16* p, Lanes v) {
  const Whole u = (Whole)v;
  *reinterpret_cast<Halves*>(p) = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, Halves);
}
// The same of sixteen numbers that are 0 or less, as those of a softmax are: no template, since the attributes of such
// types are lost in one.
inline Lanes exponential(Lanes x) {
  x = x < -87.0f ? Lanes{} - 87.0f : x;
  Lanes n = x * 1.44269504f + 12582912.0f;
  const Whole bits = (Whole)n;
  n -= 12582912.0f;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Lanes)((bits << 23) + 0x3f800000);
}
#ifdef __clang__
#define SHUFFLED(V, ...) __builtin_shufflevector(V, V, __VA_ARGS__)
#else
#define SHUFFLED(V, ...) __builtin_shuffle(V, Whole{__VA_ARGS__})
#endif
// The lanes joined in pairs, four times.
template <typename F>
inline float joined(Lanes v, F&& join) {
  v = join(v, SHUFFLED(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = join(v, SHUFFLED(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = join(v, SHUFFLED(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = join(v, SHUFFLED(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}
inline float sum16(Lanes v) { return joined(v, [](Lanes a, Lanes b) { return a + b; }); }
inline float max16(Lanes v) { return joined(v, [](Lanes a, Lanes b) { return a > b ? a : b; }); }

// Mean and 1 / standard deviation of each channel's group. Every channel is summed relative to its first pixel, and the
// channels are joined as in Chan et al. 1979, so that a large mean costs no digits.
template <typename T>
void moments(const T* x, int64_t P, int64_t C, int64_t G, float eps, float* mean, float* rstd, float* room) {
  float *first = room, *s1 = room + C, *s2 = room + 2 * C;
  for (int64_t c = 0; c < C; ++c) { first[c] = load(x + c); s1[c] = s2[c] = 0.0f; }
  for (int64_t p = 1; p < P; ++p) {
    const T* row = x + p * C;
#pragma omp simd
    for (int64_t c = 0; c < C; ++c) {
      const float v = load(row + c) - first[c];
      s1[c] += v;
      s2[c] += v * v;
    }
  }
  const int64_t D = C / G;
  for (int64_t g = 0; g < G; ++g) {
    float m = 0.0f, m2 = 0.0f;
    for (int64_t c = g * D; c < (g + 1) * D; ++c) {
      s2[c] -= s1[c] * s1[c] / P;
      first[c] += s1[c] / P;
      m += first[c];
    }
    m /= D;
    for (int64_t c = g * D; c < (g + 1) * D; ++c) m2 += s2[c] + P * (first[c] - m) * (first[c] - m);
    const float r = 1.0f / std::sqrt(std::max(m2, 0.0f) / (P * D) + eps);
    for (int64_t c = g * D; c < (g + 1) * D; ++c) { mean[c] = m; rstd[c] = r; }
  }
}

// y = f(norm(x) * gain + bias) + residual, with (gain, bias) scaled by 1 + scale and shifted by shift where given, and f
// SiLU or the identity. scale_shift is (N, 2 C), mean and rstd are (N, C) for the backward pass.
template <typename T, bool SILU>
void group_forward(const T* x, const float* gain, const float* bias, const float* scale_shift, const T* residual,
                   T* y, float* mean, float* rstd, int64_t N, int64_t P, int64_t C, int64_t G, float eps, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(3 * C), slope(C), offset(C);
    float *a = slope.data(), *b = offset.data();
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      float *m = mean + n * C, *r = rstd + n * C;
      moments(x + n * P * C, P, C, G, eps, m, r, room.data());
      for (int64_t c = 0; c < C; ++c) {
        const float s = scale_shift ? scale_shift[n * 2 * C + c] + 1.0f : 1.0f;
        const float t = scale_shift ? scale_shift[n * 2 * C + C + c] : 0.0f;
        a[c] = r[c] * gain[c] * s;
        b[c] = bias[c] * s + t - m[c] * a[c];
      }
      for (int64_t p = 0; p < P; ++p) {
        const int64_t at = (n * P + p) * C;
        const T* in = x + at;
        T* out = y + at;
        if (residual) {
          const T* more = residual + at;
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) {
            const float z = load(in + c) * a[c] + b[c];
            store(out + c, (SILU ? z * sigmoid(z) : z) + load(more + c));
          }
        } else {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) {
            const float z = load(in + c) * a[c] + b[c];
            store(out + c, SILU ? z * sigmoid(z) : z);
          }
        }
      }
    }
  }
}

// The gradients of group_forward. d_gain and d_bias are (N, C), still to be summed over N; d_scale_shift is (N, 2 C).
template <typename T, bool SILU>
void group_backward(const T* dy, const T* x, const float* gain, const float* bias, const float* scale_shift,
                    const float* mean, const float* rstd, T* dx, float* d_gain, float* d_bias, float* d_scale_shift,
                    int64_t N, int64_t P, int64_t C, int64_t G, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> held(P * C), room(7 * C);
    float *dz = held.data(), *a = room.data(), *b = a + C, *k = b + C, *s0 = k + C, *s1 = s0 + C, *u = s1 + C, *w = u + C;
    const int64_t D = C / G;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      const float *m = mean + n * C, *r = rstd + n * C;
      for (int64_t c = 0; c < C; ++c) {
        const float s = scale_shift ? scale_shift[n * 2 * C + c] + 1.0f : 1.0f;
        const float t = scale_shift ? scale_shift[n * 2 * C + C + c] : 0.0f;
        k[c] = gain[c] * s;  // dz/d(normalised x)
        a[c] = r[c] * k[c];
        b[c] = bias[c] * s + t - m[c] * a[c];
        s0[c] = s1[c] = 0.0f;
      }
      for (int64_t p = 0; p < P; ++p) {
        const T *in = x + (n * P + p) * C, *grad = dy + (n * P + p) * C;
        float* keep = dz + p * C;
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) {
          const float v = load(in + c);
          float d = load(grad + c);
          if (SILU) {
            const float z = v * a[c] + b[c], g = sigmoid(z);
            d *= g * (1.0f + z * (1.0f - g));
          }
          keep[c] = d;
          s0[c] += d;
          s1[c] += d * (v - m[c]) * r[c];
        }
      }
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
      for (int64_t p = 0; p < P; ++p) {
        const T* in = x + (n * P + p) * C;
        T* out = dx + (n * P + p) * C;
        const float* keep = dz + p * C;
#pragma omp simd
        for (int64_t c = 0; c < C; ++c) store(out + c, a[c] * keep[c] - u[c] - w[c] * load(in + c));
      }
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
    float m = 0.0f, v = 0.0f;
#pragma omp simd reduction(+ : m)
    for (int64_t c = 0; c < C; ++c) m += load(in + c);
    m /= C;
#pragma omp simd reduction(+ : v)
    for (int64_t c = 0; c < C; ++c) { const float d = load(in + c) - m; v += d * d; }
    const float r = 1.0f / std::sqrt(v / C + eps);
    mean[i] = m;
    rstd[i] = r;
    if (residual) {
      const T* more = residual + i * C;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) store(out + c, (load(in + c) - m) * r * gain[c] + bias[c] + load(more + c));
    } else {
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) store(out + c, (load(in + c) - m) * r * gain[c] + bias[c]);
    }
  }
}

// The gradients of layer_forward. d_gain and d_bias are (threads, C), still to be summed.
template <typename T>
void layer_backward(const T* dy, const T* x, const float* gain, const float* mean, const float* rstd, T* dx,
                    float* d_gain, float* d_bias, int64_t rows, int64_t C, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) {
    float *dg = d_gain + part * C, *db = d_bias + part * C;
    std::fill(dg, dg + C, 0.0f);
    std::fill(db, db + C, 0.0f);
    for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; ++i) {
      const T *in = x + i * C, *grad = dy + i * C;
      T* out = dx + i * C;
      const float m = mean[i], r = rstd[i];
      float plain = 0.0f, along = 0.0f;
#pragma omp simd reduction(+ : plain, along)
      for (int64_t c = 0; c < C; ++c) {
        const float d = load(grad + c), h = (load(in + c) - m) * r;
        dg[c] += d * h;
        db[c] += d;
        plain += d * gain[c];
        along += d * gain[c] * h;
      }
      plain /= C;
      along /= C;
#pragma omp simd
      for (int64_t c = 0; c < C; ++c) {
        const float h = (load(in + c) - m) * r;
        store(out + c, r * (load(grad + c) * gain[c] - plain - h * along));
      }
    }
  }
}

// Tokens are taken TILE at a time, so that what is computed of them stays in the first cache, and all heads of a tile
// before the next one: a token's heads lie side by side, and a head alone would use two cache lines of every twelve.
constexpr int TILE = 32;
template <int D>
using Tile = float[TILE][D];
template <int D>
using Square = float[D][D];

// Rows of a tile: f(row index, address of the row), and zeros for the rows beyond the last token.
template <int D, typename F>
inline void rows(Tile<D>& out, int count, F&& f) {
  for (int j = 0; j < count; ++j) f(j, out[j]);
  if (count < TILE) std::memset(out[count], 0, sizeof(float) * D * (TILE - count));
}

// out = m1 m2 with sixteen sums in registers at a time, of K terms each; first(i, k) is an element of m1.
template <int D, int K, bool ADD, typename F>
inline void product(int height, F&& first, const float (*m2)[D], float (*out)[D]) {
  constexpr int V = D / 16, R = 16 / V < 8 ? 16 / V : 8;
  for (int i = 0; i < height; i += R) {
    Lanes sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = ADD ? lanes(out[i + r] + 16 * v) : Lanes{};
    for (int k = 0; k < K; ++k)
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float factor = first(i + r, k);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] += factor * lanes(m2[k] + 16 * v);
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) lanes(out[i + r] + 16 * v) = sums[r][v];
  }
}

// square += a^T b over the rows of a tile.
template <int D>
inline void outer(const Tile<D>& a, const Tile<D>& b, Square<D>& square) {
  product<D, TILE, true>(D, [&](int d, int j) { return a[j][d]; }, b, square);
}

// out = a m for the rows of a tile.
template <int D>
inline void times(const Tile<D>& a, const Square<D>& m, Tile<D>& out) {
  product<D, D, false>(TILE, [&](int j, int d) { return a[j][d]; }, m, out);
}

// Asks for the row of a later tile: the processor does not guess that far across the other heads.
template <int D, typename T>
inline void ahead(const T* row) {
  for (int d = 0; d < D; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

// A tile as it lies in memory.
template <int D, typename T>
inline void read(const T* from, int64_t stride, int count, Tile<D>& out) {
  rows<D>(out, count, [&](int j, float* row) {
    ahead<D>(from + (j + TILE) * stride);
    for (int d = 0; d < D; d += 16) lanes(row + d) = load16(from + j * stride + d);
  });
}

// Linear attention (Shen et al. 2021) of H heads of one image, from tokens (L, stride) whose queries, keys and values
// of all heads lie side by side: out = softmax_channels(q) / sqrt(D) times softmax_positions(k)^T v. Left for the
// backward pass are the keys' largest values and sums of exponentials, top and sum (H, D), contexts (H, D, D), which are
// softmax(k)^T v, and levels (H, L, 2): exp(q - first) * second is the softmax of a query divided by sqrt(D).
template <typename T, int D>
void attend(const T* q, const T* k, const T* v, T* out, int64_t L, int64_t H, int64_t stride, int64_t out_stride,
            float* top, float* sum, float* contexts, float* levels) {
  Tile<D> key, value;
  std::fill(contexts, contexts + H * D * D, 0.0f);
  std::fill(sum, sum + H * D, 0.0f);
  for (int64_t c = 0; c < H * D; ++c) top[c] = load(k + c);
  for (int64_t l = 0; l < L; l += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, L - l));
    for (int64_t h = 0; h < H; ++h) {
      Square<D>& context = reinterpret_cast<Square<D>*>(contexts)[h];
      float *most = top + h * D, *total = sum + h * D;
      read<D>(v + l * stride + h * D, stride, count, value);
      read<D>(k + l * stride + h * D, stride, count, key);
      for (int d = 0; d < D; d += 16) {
        Lanes now = lanes(most + d);
        for (int j = 0; j < count; ++j) now = lanes(key[j] + d) > now ? lanes(key[j] + d) : now;
        // Where it is larger than any before, what was summed is relative to the old one.
        const Lanes factor = exponential(lanes(most + d) - now);
        Lanes all = lanes(total + d) * factor;
        lanes(most + d) = now;
        for (int j = 0; j < count; ++j) {
          lanes(key[j] + d) = exponential(lanes(key[j] + d) - now);
          all += lanes(key[j] + d);
        }
        lanes(total + d) = all;
        if (sum16(factor) != 16.0f)
          for (int i = 0; i < 16; ++i)
            for (int e = 0; e < D; e += 16) lanes(context[d + i] + e) *= factor[i];
      }
      if (count < TILE) std::memset(key[count], 0, sizeof(float) * D * (TILE - count));
      outer<D>(key, value, context);
    }
  }
  for (int64_t c = 0; c < H * D; ++c)
    for (int e = 0; e < D; ++e) contexts[c * D + e] /= sum[c];
  for (int64_t l = 0; l < L; l += TILE) {
    const int count = static_cast<int>(std::min<int64_t>(TILE, L - l));
    for (int64_t h = 0; h < H; ++h) {
      read<D>(q + l * stride + h * D, stride, count, key);
      for (int j = 0; j < count; ++j) {
        Lanes most = lanes(key[j]), total = {};
        for (int d = 16; d < D; d += 16) most = lanes(key[j] + d) > most ? lanes(key[j] + d) : most;
        const float least = max16(most);
        for (int d = 0; d < D; d += 16) total += lanes(key[j] + d) = exponential(lanes(key[j] + d) - least);
        const float factor = 1.0f / (sum16(total) * std::sqrt(static_cast<float>(D)));
        float* level = levels + 2 * (h * L + l + j);
        level[0] = least;
        level[1] = factor;
        for (int d = 0; d < D; d += 16) lanes(key[j] + d) *= factor;
      }
      times<D>(key, reinterpret_cast<const Square<D>*>(contexts)[h], value);
      for (int j = 0; j < count; ++j)
        for (int e = 0; e < D; e += 16) store16(out + (l + j) * out_stride + h * D + e, lanes(value[j] + e));
    }
  }
}

// The gradients of attend, written where q, k and v stand in an array of the same shape.
template <typename T, int D>
void attend_backward(const T* dout, const T* q, const T* k, const T* v, T* dq, T* dk, T* dv, int64_t L, int64_t H,
                     int64_t stride, int64_t out_stride, const float* top, const float* sum, const float* contexts,
                     const float* levels) {
  struct Head { Square<D> d_context, d_turned, turned; float inner[D], share[D]; };
  std::vector<Head> heads(H);
  Tile<D> query, key, value, grad, d_query, d_key, d_value;
  auto queries = [&](int64_t l, int64_t h, int count) {
    rows<D>(query, count, [&](int j, float* row) {
      const float *level = levels + 2 * (h * L + l + j), least = level[0], factor = level[1];
      const T* from = q + (l + j) * stride + h * D;
      ahead<D>(from + TILE * stride);
      for (int d = 0; d < D; d += 16) lanes(row + d) = exponential(load16(from + d) - least) * factor;
    });
    read<D>(dout + l * out_stride + h * D, out_stride, count, grad);
  };
  for (int64_t l = 0; l < L; l += TILE)
    for (int64_t h = 0; h < H; ++h) {
      queries(l, h, static_cast<int>(std::min<int64_t>(TILE, L - l)));
      outer<D>(query, grad, heads[h].d_context);
    }
  for (int64_t h = 0; h < H; ++h) {
    Head& head = heads[h];
    const Square<D>& context = reinterpret_cast<const Square<D>*>(contexts)[h];
    for (int d = 0; d < D; ++d) {
      head.share[d] = 1.0f / sum[h * D + d];
      for (int e = 0; e < D; ++e) {
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
      const int64_t at = l * stride + h * D;
      const float* most = top + h * D;
      queries(l, h, count);
      rows<D>(key, count, [&](int j, float* row) {
        ahead<D>(k + at + (j + TILE) * stride);
        for (int d = 0; d < D; d += 16)
          lanes(row + d) = exponential(load16(k + at + j * stride + d) - lanes(most + d)) * lanes(head.share + d);
      });
      read<D>(v + at, stride, count, value);
      times<D>(grad, head.turned, d_query);
      times<D>(value, head.d_turned, d_key);
      times<D>(key, head.d_context, d_value);
      for (int j = 0; j < count; ++j) {
        Lanes sums = {};
        for (int d = 0; d < D; d += 16) sums += lanes(query[j] + d) * lanes(d_query[j] + d);
        // The query holds the factor 1 / sqrt(D) once too often.
        const float along = sum16(sums) * std::sqrt(static_cast<float>(D));
        const int64_t token = at + j * stride;
        for (int d = 0; d < D; d += 16) {
          store16(dq + token + d, lanes(query[j] + d) * (lanes(d_query[j] + d) - along));
          store16(dk + token + d, lanes(key[j] + d) * (lanes(d_key[j] + d) - lanes(head.inner + d)));
          store16(dv + token + d, lanes(d_value[j] + d));
        }
      }
    }
  }
}

// Heads that a thread takes together: all of an image, unless there are fewer images than threads.
inline int64_t together(int64_t N, int64_t H, int threads) { return N >= threads ? H : 1; }

template <typename T, int D>
void attention(const T* qkv, T* out, float* top, float* sum, float* contexts, float* levels, int64_t N, int64_t L,
               int64_t H, int threads) {
  const int64_t inner = H * D, some = together(N, H, threads);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; h += some) {
      const T* at = qkv + n * L * 3 * inner + h * D;
      const int64_t keys = (n * H + h) * D;
      attend<T, D>(at, at + inner, at + 2 * inner, out + n * L * inner + h * D, L, some, 3 * inner, inner, top + keys,
                   sum + keys, contexts + keys * D, levels + 2 * (n * H + h) * L);
    }
}

template <typename T, int D>
void attention_backward(const T* dout, const T* qkv, T* d_qkv, const float* top, const float* sum,
                        const float* contexts, const float* levels, int64_t N, int64_t L, int64_t H, int threads) {
  const int64_t inner = H * D, some = together(N, H, threads);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; h += some) {
      const int64_t at = n * L * 3 * inner + h * D, keys = (n * H + h) * D;
      const T* in = qkv + at;
      T* back = d_qkv + at;
      attend_backward<T, D>(dout + n * L * inner + h * D, in, in + inner, in + 2 * inner, back, back + inner,
                            back + 2 * inner, L, some, 3 * inner, inner, top + keys, sum + keys, contexts + keys * D,
                            levels + 2 * (n * H + h) * L);
    }
}

}  // namespace

#define NORMS(NAME, T)                                                                                                \
  extern "C" void group_forward_##NAME(const void* x, const float* gain, const float* bias, const float* scale_shift, \
                                       const void* residual, void* y, float* mean, float* rstd, int64_t N, int64_t P, \
                                       int64_t C, int64_t G, float eps, int silu, int threads) {                      \
    (silu ? group_forward<T, true> : group_forward<T, false>)(                                                        \
        static_cast<const T*>(x), gain, bias, scale_shift, static_cast<const T*>(residual), static_cast<T*>(y), mean, \
        rstd, N, P, C, G, eps, threads);                                                                              \
  }                                                                                                                   \
  extern "C" void group_backward_##NAME(const void* dy, const void* x, const float* gain, const float* bias,          \
                                        const float* scale_shift, const float* mean, const float* rstd, void* dx,     \
                                        float* d_gain, float* d_bias, float* d_scale_shift, int64_t N, int64_t P,     \
                                        int64_t C, int64_t G, int silu, int threads) {                                \
    (silu ? group_backward<T, true> : group_backward<T, false>)(                                                      \
        static_cast<const T*>(dy), static_cast<const T*>(x), gain, bias, scale_shift, mean, rstd,                     \
        static_cast<T*>(dx), d_gain, d_bias, d_scale_shift, N, P, C, G, threads);                                     \
  }                                                                                                                   \
  extern "C" void layer_forward_##NAME(const void* x, const float* gain, const float* bias, const void* residual,     \
                                       void* y, float* mean, float* rstd, int64_t rows, int64_t C, float eps,         \
                                       int threads) {                                                                 \
    layer_forward<T>(static_cast<const T*>(x), gain, bias, static_cast<const T*>(residual), static_cast<T*>(y), mean, \
                     rstd, rows, C, eps, threads);                                                                    \
  }                                                                                                                   \
  extern "C" void layer_backward_##NAME(const void* dy, const void* x, const float* gain, const float* mean,          \
                                        const float* rstd, void* dx, float* d_gain, float* d_bias, int64_t rows,      \
                                        int64_t C, int threads) {                                                     \
    layer_backward<T>(static_cast<const T*>(dy), static_cast<const T*>(x), gain, mean, rstd, static_cast<T*>(dx),     \
                      d_gain, d_bias, rows, C, threads);                                                              \
  }

#define ATTENTION(NAME, T, D)                                                                                        \
  extern "C" void attention_forward_##NAME##_##D(const void* qkv, void* out, float* top, float* sum,                 \
                                                 float* contexts, float* levels, int64_t N, int64_t L, int64_t H,    \
                                                 int threads) {                                                      \
    attention<T, D>(static_cast<const T*>(qkv), static_cast<T*>(out), top, sum, contexts, levels, N, L, H, threads); \
  }                                                                                                                  \
  extern "C" void attention_backward_##NAME##_##D(const void* dout, const void* qkv, void* d_qkv, const float* top,  \
                                                  const float* sum, const float* contexts, const float* levels,      \
                                                  int64_t N, int64_t L, int64_t H, int threads) {                    \
    attention_backward<T, D>(static_cast<const T*>(dout), static_cast<const T*>(qkv), static_cast<T*>(d_qkv), top,   \
                             sum, contexts, levels, N, L, H, threads);                                               \
  }

ATTENTION(float32, float, 16)
ATTENTION(float32, float, 32)
ATTENTION(float32, float, 64)
ATTENTION(bfloat16, bfloat16, 16)
ATTENTION(bfloat16, bfloat16, 32)
ATTENTION(bfloat16, bfloat16, 64)
NORMS(float32, float)
NORMS(bfloat16, bfloat16)
