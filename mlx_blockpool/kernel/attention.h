// Attention of a few query vectors to pieces of keys and values that lie anywhere in slabs, and the merge of the pieces.
//
// One body for Metal, CUDA and C++. The preludes define for it the address spaces, the element type and the few functions that
// the three spell differently: swap() between the lanes of a simdgroup, barrier(), power2(), words as floats.
//
// Constants of a text: ELEMENT, KEY_DIM, VALUE_DIM, KV_HEADS, GROUP, KEY_BITS, KEY_GROUP_SIZE, VALUE_BITS, VALUE_GROUP_SIZE,
// EIGHTS, QUERIES, HAS_SINKS. Everything that changes from step to step is data.

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2

#define SIMDGROUPS 4
#define LOWEST (-1e30f)
#define LOG2_E 1.44269504088896340736f

#if defined(__METAL_VERSION__)

#include <metal_stdlib>

#define DEVICE device
#define THREAD thread
#define THREADGROUP threadgroup
#define SHARED threadgroup
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")
// A thread has 128 registers at most.
#define MOST_PARTS 1

namespace ragged {

using namespace metal;

#if ELEMENT == FLOAT32
typedef float Element;
#elif ELEMENT == FLOAT16
typedef half Element;
#else
typedef bfloat Element;
#endif

FUNCTION float word_as_float(uint word) { return as_type<float>(word); }
FUNCTION float half_as_float(uint bits) { return float(as_type<half>(ushort(bits))); }
FUNCTION float power2(float x) { return metal::fast::exp2(x); }
FUNCTION float larger(float a, float b) { return metal::max(a, b); }
FUNCTION void barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

template <int COUNT>
FUNCTION void swap_lanes(thread const float *mine, thread float *theirs, int apart) {
  UNROLL
  for (int i = 0; i < COUNT; i++) theirs[i] = metal::simd_shuffle_xor(mine[i], ushort(apart));
}

}  // namespace ragged

#elif defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define DEVICE
#define THREAD
#define THREADGROUP
#define SHARED __shared__
#define FUNCTION __device__ __forceinline__
#define UNROLL _Pragma("unroll")
// A thread has 255 registers: sixteen elements in a lane halve what lanes exchange.
#define MOST_PARTS 2

namespace ragged {

typedef unsigned int uint;

#if ELEMENT == FLOAT32
typedef float Element;
#elif ELEMENT == FLOAT16
typedef __half Element;
#else
typedef __nv_bfloat16 Element;
#endif

FUNCTION float word_as_float(uint word) { return __uint_as_float(word); }
FUNCTION float half_as_float(uint bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
FUNCTION float larger(float a, float b) { return fmaxf(a, b); }
FUNCTION void barrier() { __syncthreads(); }

FUNCTION float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int COUNT>
FUNCTION void swap_lanes(const float *mine, float *theirs, int apart) {
  UNROLL
  for (int i = 0; i < COUNT; i++) theirs[i] = __shfl_xor_sync(0xffffffffu, mine[i], apart);
}

}  // namespace ragged

#else

#include "simt.h"

#endif

namespace ragged {

// 16 bytes of 16-bit elements are 8 of them: what a lane loads at once. LANES lanes have PARTS times 8 elements of a row each.
#define PARTS (EIGHTS < MOST_PARTS ? EIGHTS : MOST_PARTS)
#define LANES (EIGHTS / PARTS)
#define WIDTH (8 * PARTS)
// Keys that a simdgroup reads side by side, and how often in one pass of its loop.
#define ABREAST (32 / LANES)
#define KEYS 2
#define STRIDE (KEYS * ABREAST)
// What a vector takes of the memory of a threadgroup, and all vectors of all simdgroups.
#define PLACE (LANES * WIDTH + 2)
#define MEMORY (SIMDGROUPS * QUERIES * PLACE)

struct Eight {
  float at[8];
};

// Rows of keys or values: elements, or packed words with the scale and the bias of each group.
struct Rows {
  const DEVICE uint *words;
  const DEVICE Element *scales;
  const DEVICE Element *biases;
};

FUNCTION Rows rows_of(const DEVICE Element *elements) {
  Rows rows;
  rows.words = (const DEVICE uint *)elements;
  rows.scales = elements;
  rows.biases = elements;
  return rows;
}

FUNCTION Rows rows_of(const DEVICE uint *words, const DEVICE Element *scales, const DEVICE Element *biases) {
  Rows rows;
  rows.words = words;
  rows.scales = scales;
  rows.biases = biases;
  return rows;
}

// Eight neighbouring elements as they lie in memory, of BITS bits each.
template <int BITS>
struct Packed;

template <>
struct Packed<32> {
  uint4 low, high;
};

template <>
struct Packed<16> {
  uint4 all;
};

template <>
struct Packed<8> {
  uint2 all;
  Element scale, bias;
};

template <>
struct Packed<4> {
  uint all;
  Element scale, bias;
};

// The eight elements number `at`, counted in eights, of groups of GROUP_SIZE elements.
template <int GROUP_SIZE>
FUNCTION void load(THREAD Packed<32> &into, Rows rows, size_t at) {
  into.low = ((const DEVICE uint4 *)rows.words)[2 * at];
  into.high = ((const DEVICE uint4 *)rows.words)[2 * at + 1];
}

template <int GROUP_SIZE>
FUNCTION void load(THREAD Packed<16> &into, Rows rows, size_t at) {
  into.all = ((const DEVICE uint4 *)rows.words)[at];
}

template <int GROUP_SIZE>
FUNCTION void load(THREAD Packed<8> &into, Rows rows, size_t at) {
  into.all = ((const DEVICE uint2 *)rows.words)[at];
  into.scale = rows.scales[at / (GROUP_SIZE / 8)];
  into.bias = rows.biases[at / (GROUP_SIZE / 8)];
}

template <int GROUP_SIZE>
FUNCTION void load(THREAD Packed<4> &into, Rows rows, size_t at) {
  into.all = rows.words[at];
  into.scale = rows.scales[at / (GROUP_SIZE / 8)];
  into.bias = rows.biases[at / (GROUP_SIZE / 8)];
}

FUNCTION void unpack(Packed<32> packed, THREAD Eight &into) {
  into.at[0] = word_as_float(packed.low.x);
  into.at[1] = word_as_float(packed.low.y);
  into.at[2] = word_as_float(packed.low.z);
  into.at[3] = word_as_float(packed.low.w);
  into.at[4] = word_as_float(packed.high.x);
  into.at[5] = word_as_float(packed.high.y);
  into.at[6] = word_as_float(packed.high.z);
  into.at[7] = word_as_float(packed.high.w);
}

// The two elements of 16 bits in a word.
FUNCTION void unpack_pair(uint word, THREAD float &low, THREAD float &high) {
#if ELEMENT == BFLOAT16
  low = word_as_float(word << 16);
  high = word_as_float(word & 0xffff0000u);
#else
  low = half_as_float(word & 0xffffu);
  high = half_as_float(word >> 16);
#endif
}

FUNCTION void unpack(Packed<16> packed, THREAD Eight &into) {
  unpack_pair(packed.all.x, into.at[0], into.at[1]);
  unpack_pair(packed.all.y, into.at[2], into.at[3]);
  unpack_pair(packed.all.z, into.at[4], into.at[5]);
  unpack_pair(packed.all.w, into.at[6], into.at[7]);
}

FUNCTION void unpack(Packed<8> packed, THREAD Eight &into) {
  float scale = float(packed.scale), bias = float(packed.bias);
  UNROLL
  for (int i = 0; i < 4; i++) {
    into.at[i] = scale * float((packed.all.x >> (8 * i)) & 255u) + bias;
    into.at[4 + i] = scale * float((packed.all.y >> (8 * i)) & 255u) + bias;
  }
}

FUNCTION void unpack(Packed<4> packed, THREAD Eight &into) {
  float scale = float(packed.scale), bias = float(packed.bias);
  UNROLL
  for (int i = 0; i < 8; i++) into.at[i] = scale * float((packed.all >> (4 * i)) & 15u) + bias;
}

// Part `part` of a lane, in eights. A lane beyond the last ones loads what another loads, and its result is not used.
template <int DIM>
FUNCTION int part_of(int part, int lane) {
  int at = part * LANES + lane % LANES;
  return at < DIM / 8 ? at : DIM / 8 - 1;
}

// One item of the work list: a piece of keys for up to 4 * QUERIES vectors of each kv head.
enum {
  SOURCE,
  HEAD_STRIDE,   // of the rows in the source
  TOKEN_STRIDE,
  FIRST,         // token
  COUNT,         // of tokens
  ROWS,          // where the numbers of its rows are
  FIRST_VECTOR,  // vector i is row i / GROUP, head i % GROUP
  VECTORS,
  MASK,          // where the bits of its rows are, or -1
  MASK_WORDS,    // of one row
  ITEM_PLACE,    // of the partial sums of its first vector
  ITEM_INTS = 12
};

// What is needed again after many keys is read again: it would take registers meanwhile.
FUNCTION int again(const DEVICE int *item, int field) { return ((const volatile DEVICE int *)item)[field]; }

// Which vectors and which keys a simdgroup has: those of set `set`, and every `stripes`-th pass over the keys.
struct Share {
  int first, set, sets, stripe, stripes;
};

FUNCTION Share share_of(int vectors, int simdgroup) {
  Share share;
  share.sets = vectors > 2 * QUERIES ? 4 : vectors > QUERIES ? 2 : 1;
  share.stripes = SIMDGROUPS / share.sets;
  share.set = simdgroup % share.sets;
  share.stripe = simdgroup / share.sets;
  share.first = share.set * QUERIES;
  return share;
}

// What a lane holds of each vector: parts of the query and of the sum of values, the largest score and the sum of weights.
struct State {
  float query[QUERIES][WIDTH];
  float sum[QUERIES][WIDTH];
  float most[QUERIES];
  float total[QUERIES];
};

// The number in the item's list of rows of vector `query` of a simdgroup. Vectors beyond the last are that one again.
FUNCTION int vector_of(int first, int count, Share share, int query) {
  int vector = share.first + query;
  return first + (vector < count ? vector : count - 1);
}

FUNCTION void begin(
    THREAD State &state, const DEVICE int *work, const DEVICE Element *queries, const DEVICE int *item, Share share,
    float scale, int head, int lane) {
  Rows rows = rows_of(queries);
  UNROLL
  for (int q = 0; q < QUERIES; q++) {
    int vector = vector_of(item[FIRST_VECTOR], item[VECTORS], share, q);
    size_t row = size_t(work[item[ROWS] + vector / GROUP]) * (KV_HEADS * GROUP) + head * GROUP + vector % GROUP;
    UNROLL
    for (int p = 0; p < PARTS; p++) {
      Packed<ELEMENT == FLOAT32 ? 32 : 16> packed;
      Eight eight;
      load<8>(packed, rows, row * (KEY_DIM / 8) + part_of<KEY_DIM>(p, lane));
      unpack(packed, eight);
      float factor = p * LANES + lane % LANES < KEY_DIM / 8 ? scale * LOG2_E : 0.0f;
      UNROLL
      for (int i = 0; i < 8; i++) state.query[q][8 * p + i] = factor * eight.at[i];
    }
    UNROLL
    for (int i = 0; i < WIDTH; i++) state.sum[q][i] = 0.0f;
    state.most[q] = LOWEST;
    state.total[q] = 0.0f;
  }
}

// Scores of one key, this lane's part of them.
FUNCTION void multiply(THREAD const State &state, THREAD const Packed<KEY_BITS> *packed, THREAD float *scores) {
  UNROLL
  for (int q = 0; q < QUERIES; q++) scores[q] = 0.0f;
  UNROLL
  for (int p = 0; p < PARTS; p++) {
    Eight key;
    unpack(packed[p], key);
    UNROLL
    for (int q = 0; q < QUERIES; q++) {
      UNROLL
      for (int i = 0; i < 8; i++) scores[q] += state.query[q][8 * p + i] * key.at[i];
    }
  }
}

// The values of one key, weighed.
FUNCTION void add(THREAD State &state, THREAD const Packed<VALUE_BITS> *packed, THREAD const float *weights) {
  UNROLL
  for (int p = 0; p < PARTS; p++) {
    Eight value;
    unpack(packed[p], value);
    UNROLL
    for (int q = 0; q < QUERIES; q++) {
      UNROLL
      for (int i = 0; i < 8; i++) state.sum[q][8 * p + i] += weights[q] * value.at[i];
    }
  }
}

// Scores of token `token` that the masks of its rows hide.
FUNCTION void hide(THREAD float *scores, const DEVICE int *work, const DEVICE int *item, Share share, int token) {
  int first = again(item, FIRST_VECTOR), count = again(item, VECTORS);
  const DEVICE int *mask = work + again(item, MASK) + token / 32;
  UNROLL
  for (int q = 0; q < QUERIES; q++) {
    uint word = uint(mask[vector_of(first, count, share, q) / GROUP * again(item, MASK_WORDS)]);
    scores[q] = (word >> (token % 32)) & 1u ? scores[q] : LOWEST;
  }
}

// Softmax as it goes along, in base 2: scores become weights, against the largest score so far.
FUNCTION void weigh(THREAD State &state, THREAD float *scores) {
  UNROLL
  for (int q = 0; q < QUERIES; q++) {
    float most = state.most[q];
    UNROLL
    for (int k = 0; k < KEYS; k++) most = larger(most, scores[k * QUERIES + q]);
    float kept = power2(state.most[q] - most);
    float total = kept * state.total[q];
    UNROLL
    for (int k = 0; k < KEYS; k++) {
      scores[k * QUERIES + q] = power2(scores[k * QUERIES + q] - most);
      total += scores[k * QUERIES + q];
    }
    UNROLL
    for (int i = 0; i < WIDTH; i++) state.sum[q][i] *= kept;
    state.most[q] = most;
    state.total[q] = total;
  }
}

// The part of a piece that a kv head has: its first row in the source, and how far apart the rows of `count` tokens are.
struct Run {
  uint row, stride;
  int count;
};

// Keys or values of the pass that begins with token `start`. Those beyond the last one are that one again: loads need no branch.
template <int DIM, int BITS, int GROUP_SIZE>
FUNCTION void load_pass(THREAD Packed<BITS> *into, Rows rows, Run run, int start, int lane) {
  UNROLL
  for (int k = 0; k < KEYS; k++) {
    int token = start + lane / LANES + k * ABREAST;
    // Rows of a source are fewer than 2^31; offsets of elements have 64 bits.
    size_t row = run.row + uint(token < run.count ? token : run.count - 1) * run.stride;
    UNROLL
    for (int p = 0; p < PARTS; p++) load<GROUP_SIZE>(into[k * PARTS + p], rows, row * (DIM / 8) + part_of<DIM>(p, lane));
  }
}

// Scores of one pass, each summed over the lanes of its key.
FUNCTION void score(THREAD const State &state, THREAD const Packed<KEY_BITS> *key, THREAD float *scores) {
  float others[KEYS * QUERIES];
  UNROLL
  for (int k = 0; k < KEYS; k++) multiply(state, key + k * PARTS, scores + k * QUERIES);
  UNROLL
  for (int apart = LANES / 2; apart; apart /= 2) {
    swap_lanes<KEYS * QUERIES>(scores, others, apart);
    UNROLL
    for (int i = 0; i < KEYS * QUERIES; i++) scores[i] += others[i];
  }
}

// Scores of tokens that are beyond the last one.
FUNCTION void hide_beyond(THREAD float *scores, int count, int start, int lane) {
  UNROLL
  for (int k = 0; k < KEYS; k++) {
    bool is_beyond = start + lane / LANES + k * ABREAST >= count;
    UNROLL
    for (int q = 0; q < QUERIES; q++) scores[k * QUERIES + q] = is_beyond ? LOWEST : scores[k * QUERIES + q];
  }
}

// All passes of a simdgroup, KEYS keys of each group of LANES lanes in each. What the next pass needs is loaded as soon as there
// is room for it: keys once the scores are known, values once they are added; and the first ones before the queries.
FUNCTION void read(
    THREAD State &state, const DEVICE int *work, const DEVICE Element *queries, Rows keys, Rows values, const DEVICE int *item,
    Share share, float scale, int head, int lane) {
  Packed<KEY_BITS> key[KEYS * PARTS];
  Packed<VALUE_BITS> value[KEYS * PARTS];
  float scores[KEYS * QUERIES];
  Run run;
  run.row = uint(head) * uint(item[HEAD_STRIDE]) + uint(item[FIRST]) * uint(item[TOKEN_STRIDE]);
  run.stride = uint(item[TOKEN_STRIDE]);
  run.count = item[COUNT];
  bool has_mask = item[MASK] >= 0;
  int start = share.stripe * STRIDE;
  load_pass<KEY_DIM, KEY_BITS, KEY_GROUP_SIZE>(key, keys, run, start, lane);
  load_pass<VALUE_DIM, VALUE_BITS, VALUE_GROUP_SIZE>(value, values, run, start, lane);
  begin(state, work, queries, item, share, scale, head, lane);
  while (start < run.count) {
    int next = start + share.stripes * STRIDE;
    score(state, key, scores);
    load_pass<KEY_DIM, KEY_BITS, KEY_GROUP_SIZE>(key, keys, run, next, lane);
    hide_beyond(scores, run.count, start, lane);
    UNROLL
    for (int k = 0; has_mask && k < KEYS; k++) {
      int token = start + lane / LANES + k * ABREAST;
      if (token < run.count) hide(scores + k * QUERIES, work, item, share, token);
    }
    weigh(state, scores);
    UNROLL
    for (int k = 0; k < KEYS; k++) add(state, value + k * PARTS, scores + k * QUERIES);
    load_pass<VALUE_DIM, VALUE_BITS, VALUE_GROUP_SIZE>(value, values, run, next, lane);
    start = next;
  }
}

// The groups of LANES lanes become one: afterwards all of them hold the same.
FUNCTION void merge_lanes(THREAD State &state) {
  UNROLL
  for (int q = 0; q < QUERIES; q++) {
    UNROLL
    for (int apart = LANES; apart < 32; apart *= 2) {
      float mine[WIDTH + 2], theirs[WIDTH + 2];
      UNROLL
      for (int i = 0; i < WIDTH; i++) mine[i] = state.sum[q][i];
      mine[WIDTH] = state.total[q];
      mine[WIDTH + 1] = state.most[q];
      swap_lanes<WIDTH + 2>(mine, theirs, apart);
      float most = larger(mine[WIDTH + 1], theirs[WIDTH + 1]);
      float a = power2(mine[WIDTH + 1] - most), b = power2(theirs[WIDTH + 1] - most);
      UNROLL
      for (int i = 0; i < WIDTH; i++) state.sum[q][i] = a * mine[i] + b * theirs[i];
      state.total[q] = a * mine[WIDTH] + b * theirs[WIDTH];
      state.most[q] = most;
    }
  }
}

// A vector's sums in the memory of the threadgroup; neighbouring lanes write neighbouring words.
FUNCTION void put(THREADGROUP float *place, THREAD const float *sum, float total, float most, int lane) {
  UNROLL
  for (int i = 0; i < WIDTH; i++) place[i * LANES + lane] = sum[i];
  place[LANES * WIDTH] = total;
  place[LANES * WIDTH + 1] = most;
}

FUNCTION void store(DEVICE float *to, THREAD const float *from) {
  float4 low, high;
  low.x = from[0];
  low.y = from[1];
  low.z = from[2];
  low.w = from[3];
  high.x = from[4];
  high.y = from[5];
  high.z = from[6];
  high.w = from[7];
  ((DEVICE float4 *)to)[0] = low;
  ((DEVICE float4 *)to)[1] = high;
}

// A vector's sums of all stripes: the partial sums of an item. `place`: of the first stripe; the others follow, `apart` floats
// from each other.
FUNCTION void take(const THREADGROUP float *place, int stripes, int apart, DEVICE float *sums, DEVICE float *stats, int lane) {
  float sum[WIDTH], total = 0.0f, most = LOWEST;
  for (int s = 0; s < stripes; s++) most = larger(most, place[s * apart + LANES * WIDTH + 1]);
  UNROLL
  for (int i = 0; i < WIDTH; i++) sum[i] = 0.0f;
  for (int s = 0; s < stripes; s++) {
    const THREADGROUP float *from = place + s * apart;
    float factor = power2(from[LANES * WIDTH + 1] - most);
    total += factor * from[LANES * WIDTH];
    UNROLL
    for (int i = 0; i < WIDTH; i++) sum[i] += factor * from[i * LANES + lane];
  }
  UNROLL
  for (int p = 0; p < PARTS; p++) {
    if (p * LANES + lane < VALUE_DIM / 8) store(sums + 8 * (p * LANES + lane), sum + 8 * p);
  }
  if (lane == 0) {
    stats[0] = most;
    stats[1] = total;
  }
}

// One item for one kv head, by a threadgroup of SIMDGROUPS simdgroups of 32 lanes.
// queries: [rows, KV_HEADS * GROUP, KEY_DIM]; sums: [places, KV_HEADS, VALUE_DIM]; stats: [places, KV_HEADS, 2],
// the largest score in base 2 and the sum of weights against it. memory: of the threadgroup, MEMORY floats.
FUNCTION void attend(
    const DEVICE int *work, const DEVICE float *params, const DEVICE Element *queries, Rows keys, Rows values,
    DEVICE float *sums, DEVICE float *stats, THREADGROUP float *memory, int number, int head, int simdgroup, int lane) {
  const DEVICE int *item = work + number * ITEM_INTS;
  Share share = share_of(item[VECTORS], simdgroup);
  // Those that have the same vectors are next to each other.
  THREADGROUP float *set = memory + share.set * share.stripes * (QUERIES * PLACE);
  // A set without vectors only takes part in the barrier.
  if (share.first < item[VECTORS]) {
    State state;
    read(state, work, queries, keys, values, item, share, params[0], head, lane);
    merge_lanes(state);
    THREADGROUP float *mine = set + share.stripe * (QUERIES * PLACE);
    UNROLL
    for (int q = 0; q < QUERIES; q++) {
      if (lane < LANES) put(mine + q * PLACE, state.sum[q], state.total[q], state.most[q], lane);
    }
  }
  barrier();
  for (int q = share.stripe; q < QUERIES; q += share.stripes) {
    if (share.first + q >= again(item, VECTORS) || lane >= LANES) break;
    size_t place = size_t(again(item, ITEM_PLACE) + share.first + q) * KV_HEADS + head;
    take(set + q * PLACE, share.stripes, QUERIES * PLACE, sums + place * VALUE_DIM, stats + place * 2, lane);
  }
}

FUNCTION float largest_of_lanes(float x) {
  UNROLL
  for (int apart = 16; apart; apart /= 2) {
    float other;
    swap_lanes<1>(&x, &other, apart);
    x = larger(x, other);
  }
  return x;
}

FUNCTION float sum_of_lanes(float x) {
  UNROLL
  for (int apart = 16; apart; apart /= 2) {
    float other;
    swap_lanes<1>(&x, &other, apart);
    x += other;
  }
  return x;
}

// The partial sums of one query head of one row, by one simdgroup; `number` is row * heads + head.
// places: for vector row * GROUP + head % GROUP, where its list begins; the vector after it begins where its list ends.
FUNCTION void merge(
    const DEVICE int *places, const DEVICE float *sums, const DEVICE float *stats, float sink, DEVICE Element *out, int number,
    int lane) {
  int row = number / (KV_HEADS * GROUP), head = number % (KV_HEADS * GROUP);
  int start = places[row * GROUP + head % GROUP], end = places[row * GROUP + head % GROUP + 1];
  float most = sink, total = 0.0f;
  for (int i = start + lane; i < end; i += 32) most = larger(most, stats[2 * (size_t(places[i]) * KV_HEADS + head / GROUP)]);
  most = largest_of_lanes(most);
  for (int i = start + lane; i < end; i += 32) {
    const DEVICE float *stat = stats + 2 * (size_t(places[i]) * KV_HEADS + head / GROUP);
    total += power2(stat[0] - most) * stat[1];
  }
  total = sum_of_lanes(total);
  if (HAS_SINKS) total += power2(sink - most);
  for (int part = lane; part < VALUE_DIM / 4; part += 32) {
    float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
    for (int i = start; i < end; i++) {
      size_t place = size_t(places[i]) * KV_HEADS + head / GROUP;
      float factor = power2(stats[2 * place] - most);
      float4 four = ((const DEVICE float4 *)sums)[place * (VALUE_DIM / 4) + part];
      a += factor * four.x;
      b += factor * four.y;
      c += factor * four.z;
      d += factor * four.w;
    }
    DEVICE Element *to = out + size_t(number) * VALUE_DIM + 4 * part;
    to[0] = Element(a / total);
    to[1] = Element(b / total);
    to[2] = Element(c / total);
    to[3] = Element(d / total);
  }
}

}  // namespace ragged
