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

// Softmax over the channels of one query, divided by sqrt(D).
template <typename T, int D>
inline void queries(const T* q, float* row) {
  float top = load(q), sum = 0.0f;
#pragma omp simd reduction(max : top)
  for (int d = 0; d < D; ++d) top = std::max(top, load(q + d));
#pragma omp simd reduction(+ : sum)
  for (int d = 0; d < D; ++d) {
    row[d] = exponential(load(q + d) - top);
    sum += row[d];
  }
  const float factor = 1.0f / (sum * std::sqrt(static_cast<float>(D)));
#pragma omp simd
  for (int d = 0; d < D; ++d) row[d] *= factor;
}

// Tokens are taken BLOCK at a time, so that a row of a context is loaded once for all of them.
constexpr int BLOCK = 8;

// Rows of a block: f(row index, address of the row), and zeros for the rows beyond the last token.
template <int D, typename F>
inline void rows(float (*out)[D], int count, F&& f) {
  for (int j = 0; j < BLOCK; ++j) {
    if (j < count) {
      f(j, out[j]);
    } else {
      for (int d = 0; d < D; ++d) out[j][d] = 0.0f;
    }
  }
}

// context += a^T b over the rows of a block.
template <int D>
inline void outer(const float (*a)[D], const float (*b)[D], float (*context)[D]) {
  for (int d = 0; d < D; ++d) {
#pragma omp simd
    for (int e = 0; e < D; ++e) {
      float sum = context[d][e];
#pragma GCC unroll 8
      for (int j = 0; j < BLOCK; ++j) sum += a[j][d] * b[j][e];
      context[d][e] = sum;
    }
  }
}

// out = a m for the rows of a block.
template <int D>
inline void times(const float (*a)[D], const float (*m)[D], float (*out)[D]) {
  for (int j = 0; j < BLOCK; j += 4) {
    float sums[4][D] = {};
    for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const float factor = a[j + i][d];
#pragma omp simd
        for (int e = 0; e < D; ++e) sums[i][e] += factor * m[d][e];
      }
    }
    std::memcpy(out[j], sums, sizeof sums);
  }
}

// Linear attention (Shen et al. 2021) of one head, from tokens (L, stride) that hold D queries, keys and values at the
// given addresses: out = softmax_channels(q) / sqrt(D) times softmax_positions(k)^T v. top and sum are the keys' (D,).
template <typename T, int D>
void attend(const T* q, const T* k, const T* v, T* out, int64_t L, int64_t stride, int64_t out_stride, float* top,
            float* sum) {
  float context[D][D] = {}, key[BLOCK][D], value[BLOCK][D];
  for (int d = 0; d < D; ++d) { top[d] = load(k + d); sum[d] = 0.0f; }
  for (int64_t l = 1; l < L; ++l)
#pragma omp simd
    for (int d = 0; d < D; ++d) {
      const float x = load(k + l * stride + d);
      top[d] = x > top[d] ? x : top[d];
    }
  for (int64_t l = 0; l < L; l += BLOCK) {
    const int count = static_cast<int>(std::min<int64_t>(BLOCK, L - l));
    rows<D>(key, count, [&](int j, float* row) {
#pragma omp simd
      for (int d = 0; d < D; ++d) {
        row[d] = exponential(load(k + (l + j) * stride + d) - top[d]);
        sum[d] += row[d];
      }
    });
    rows<D>(value, count, [&](int j, float* row) {
#pragma omp simd
      for (int d = 0; d < D; ++d) row[d] = load(v + (l + j) * stride + d);
    });
    outer<D>(key, value, context);
  }
  for (int d = 0; d < D; ++d)
#pragma omp simd
    for (int e = 0; e < D; ++e) context[d][e] /= sum[d];
  for (int64_t l = 0; l < L; l += BLOCK) {
    const int count = static_cast<int>(std::min<int64_t>(BLOCK, L - l));
    rows<D>(key, count, [&](int j, float* row) { queries<T, D>(q + (l + j) * stride, row); });
    times<D>(key, context, value);
    for (int j = 0; j < count; ++j)
#pragma omp simd
      for (int e = 0; e < D; ++e) store(out + (l + j) * out_stride + e, value[j][e]);
  }
}

// The gradients of attend, written where q, k and v stand in an array of the same shape.
template <typename T, int D>
void attend_backward(const T* dout, const T* q, const T* k, const T* v, T* dq, T* dk, T* dv, int64_t L, int64_t stride,
                     int64_t out_stride, const float* top, const float* sum) {
  float context[D][D] = {}, d_context[D][D] = {}, turned[D][D], d_turned[D][D], inner[D] = {}, share[D];
  float query[BLOCK][D], key[BLOCK][D], value[BLOCK][D], grad[BLOCK][D];
  float d_query[BLOCK][D], d_key[BLOCK][D], d_value[BLOCK][D];
  for (int d = 0; d < D; ++d) share[d] = 1.0f / sum[d];
  auto read = [&](int64_t l, int count) {
    rows<D>(query, count, [&](int j, float* row) { queries<T, D>(q + (l + j) * stride, row); });
    rows<D>(key, count, [&](int j, float* row) {
#pragma omp simd
      for (int d = 0; d < D; ++d) row[d] = exponential(load(k + (l + j) * stride + d) - top[d]) * share[d];
    });
    rows<D>(value, count, [&](int j, float* row) {
#pragma omp simd
      for (int d = 0; d < D; ++d) row[d] = load(v + (l + j) * stride + d);
    });
    rows<D>(grad, count, [&](int j, float* row) {
#pragma omp simd
      for (int d = 0; d < D; ++d) row[d] = load(dout + (l + j) * out_stride + d);
    });
  };
  for (int64_t l = 0; l < L; l += BLOCK) {
    read(l, static_cast<int>(std::min<int64_t>(BLOCK, L - l)));
    outer<D>(key, value, context);
    outer<D>(query, grad, d_context);
  }
  for (int d = 0; d < D; ++d)
    for (int e = 0; e < D; ++e) {
      turned[e][d] = context[d][e];
      d_turned[e][d] = d_context[d][e];
      inner[d] += context[d][e] * d_context[d][e];  // sum over positions of key times its gradient
    }
  for (int64_t l = 0; l < L; l += BLOCK) {
    const int count = static_cast<int>(std::min<int64_t>(BLOCK, L - l));
    read(l, count);
    times<D>(grad, turned, d_query);
    times<D>(value, d_turned, d_key);
    times<D>(key, d_context, d_value);
    for (int j = 0; j < count; ++j) {
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (int d = 0; d < D; ++d) along += query[j][d] * d_query[j][d];
      along *= std::sqrt(static_cast<float>(D));  // the query holds the factor 1 / sqrt(D) once too often
      const int64_t at = (l + j) * stride;
#pragma omp simd
      for (int d = 0; d < D; ++d) {
        store(dq + at + d, query[j][d] * (d_query[j][d] - along));
        store(dk + at + d, key[j][d] * (d_key[j][d] - inner[d]));
        store(dv + at + d, d_value[j][d]);
      }
    }
  }
}

template <typename T, int D>
void attention(const T* qkv, T* out, float* top, float* sum, int64_t N, int64_t L, int64_t H, int threads) {
  const int64_t inner = H * D;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h) {
      const T* at = qkv + n * L * 3 * inner + h * D;
      const int64_t keys = (n * H + h) * D;
      attend<T, D>(at, at + inner, at + 2 * inner, out + n * L * inner + h * D, L, 3 * inner, inner, top + keys,
                   sum + keys);
    }
}

template <typename T, int D>
void attention_backward(const T* dout, const T* qkv, T* d_qkv, const float* top, const float* sum, int64_t N, int64_t L,
                        int64_t H, int threads) {
  const int64_t inner = H * D;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
  for (int64_t n = 0; n < N; ++n)
    for (int64_t h = 0; h < H; ++h) {
      const int64_t at = n * L * 3 * inner + h * D, keys = (n * H + h) * D;
      const T* in = qkv + at;
      T* back = d_qkv + at;
      attend_backward<T, D>(dout + n * L * inner + h * D, in, in + inner, in + 2 * inner, back, back + inner,
                            back + 2 * inner, L, 3 * inner, inner, top + keys, sum + keys);
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
  extern "C" void attention_forward_##NAME##_##D(const void* qkv, void* out, float* top, float* sum, int64_t N,      \
                                                 int64_t L, int64_t H, int threads) {                                \
    attention<T, D>(static_cast<const T*>(qkv), static_cast<T*>(out), top, sum, N, L, H, threads);                   \
  }                                                                                                                  \
  extern "C" void attention_backward_##NAME##_##D(const void* dout, const void* qkv, void* d_qkv, const float* top,  \
                                                  const float* sum, int64_t N, int64_t L, int64_t H, int threads) {  \
    attention_backward<T, D>(static_cast<const T*>(dout), static_cast<const T*>(qkv), static_cast<T*>(d_qkv), top,   \
                             sum, N, L, H, threads);                                                                 \
  }

ATTENTION(float32, float, 16)
ATTENTION(float32, float, 32)
ATTENTION(float32, float, 64)
ATTENTION(bfloat16, bfloat16, 16)
ATTENTION(bfloat16, bfloat16, 32)
ATTENTION(bfloat16, bfloat16, 64)
NORMS(float32, float)
NORMS(bfloat16, bfloat16)
