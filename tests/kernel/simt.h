// The prelude of attention.h for C++, and what mlx writes around it for Metal: threads of a threadgroup are fibers of one thread.
//
// A fiber runs until it waits for its simdgroup (swap_lanes) or its threadgroup (barrier). run_threadgroups() runs a kernel.
// A simdgroup or a threadgroup of which some wait where others are gone is an error that ends the process.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SIMT_SANITIZED 1
#endif

#define device
#define constant
#define DEVICE
#define THREAD
#define THREADGROUP
#define SHARED static
#define FUNCTION static inline
#define UNROLL
#if !defined(MOST_PARTS)
#define MOST_PARTS 1
#endif

typedef unsigned int uint;
struct uint3 { uint x, y, z; };

// With SIMT_ALIGNED they have the alignment that devices ask for; numpy and mlx's arrays on a CPU have less.
#if defined(SIMT_ALIGNED)
#define SIMT_ALIGN(bytes) alignas(bytes)
#else
#define SIMT_ALIGN(bytes)
#endif
struct SIMT_ALIGN(8) uint2 { uint x, y; };
struct SIMT_ALIGN(16) uint4 { uint x, y, z, w; };
struct SIMT_ALIGN(16) float4 { float x, y, z, w; };

namespace simt {

inline uint bits_of(float x) { uint bits; memcpy(&bits, &x, 4); return bits; }
inline float of_bits(uint bits) { float x; memcpy(&x, &bits, 4); return x; }

inline float half_to_float(uint16_t half) {
  uint sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
  if (exponent == 31) return of_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent) return of_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
  float small = fraction * (1.0f / 16777216.0f);
  return sign ? -small : small;
}

// To the nearest, of two equally near ones to the even.
inline uint16_t float_to_half(float x) {
  uint bits = bits_of(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return sign | 0x7e00u;
  if (rest >= 0x477ff000u) return sign | 0x7c00u;
  if (rest < 0x38800000u) return sign | uint(lrintf(of_bits(rest) * 16777216.0f));
  rest -= 0x38000000u;
  return sign | ((rest + 0xfffu + ((rest >> 13) & 1u)) >> 13);
}

inline uint16_t float_to_bfloat(float x) {
  uint bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

}  // namespace simt

struct float16_t {
  uint16_t bits;
  float16_t() = default;
  explicit float16_t(float x) : bits(simt::float_to_half(x)) {}
  explicit operator float() const { return simt::half_to_float(bits); }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float x) : bits(simt::float_to_bfloat(x)) {}
  explicit operator float() const { return simt::of_bits(uint(bits) << 16); }
};

namespace simt {

const int LANE_COUNT = 32, MOST_THREADS = 128, MOST_VALUES = 32, STACK_BYTES = 256 * 1024;
enum Stage { RUNS, WAITS_FOR_SIMDGROUP, WAITS_FOR_THREADGROUP, GONE };

// How fibers are switched: in a few instructions; or by the C library, which takes ten times as long, and longer still in a way
// that sanitizers can follow.
#if defined(__x86_64__) && !defined(SIMT_BY_LIBRARY)
#define SIMT_BY_STACK 1
extern "C" void simt_switch(void **from, void *to);
asm(R"(
.text
.local simt_switch
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(SIMT_SANITIZED)
#define SIMT_BY_CONTEXT 1
#endif

struct Fiber {
  ucontext_t context;
  jmp_buf at;
  void *top;
  int stage, phase, index;
  char *stack;
  void *fake_stack;
};

struct Simdgroup {
  int arrived, count;
  float values[2][LANE_COUNT * MOST_VALUES];
};

// What a kernel is called with: its threadgroup, and the fiber's place in it.
struct Position {
  uint3 group;
  uint thread;
};
typedef void (*Kernel)(void **buffers, Position position);

static Fiber fibers[MOST_THREADS];
static Simdgroup simdgroups[MOST_THREADS / LANE_COUNT];
// Where each thread is in the order in which they run, and the other way round. Simdgroups stay together.
static int order[MOST_THREADS];
static int thread_count, gone_count, barrier_count, running;
static Fiber *current;
static Fiber outside;
static size_t outside_bytes;
static Kernel kernel;
static void **kernel_buffers;
static uint3 kernel_group;

[[noreturn]] static inline void fail(const char *what) {
  fprintf(stderr, "simt: %s\n", what);
  abort();
}

static __attribute__((noinline)) void switch_to(Fiber *next) {
  Fiber *previous = current;
  current = next;
#if defined(SIMT_SANITIZED)
  __sanitizer_start_switch_fiber(&previous->fake_stack, next->stack, next == &outside ? outside_bytes : STACK_BYTES);
#endif
#if defined(SIMT_BY_STACK)
  simt_switch(&previous->top, next->top);
#elif defined(SIMT_BY_CONTEXT)
  swapcontext(&previous->context, &next->context);
#else
  if (!_setjmp(previous->at)) _longjmp(next->at, 1);
#endif
#if defined(SIMT_SANITIZED)
  __sanitizer_finish_switch_fiber(previous->fake_stack, 0, 0);
#endif
}

// The next fiber that can run, first of this simdgroup. There is none only if some wait for what never comes.
static void run_others() {
  int from = current->index, first = from / LANE_COUNT * LANE_COUNT;
  for (int i = 1; i < LANE_COUNT; i++) {
    int at = first + (from - first + i) % LANE_COUNT;
    if (fibers[order[at]].stage == RUNS) return switch_to(&fibers[order[at]]);
  }
  for (int i = LANE_COUNT; i < thread_count; i += LANE_COUNT) {
    for (int j = 0; j < LANE_COUNT; j++) {
      int at = (first + i + j) % thread_count;
      if (fibers[order[at]].stage == RUNS) return switch_to(&fibers[order[at]]);
    }
  }
  if (gone_count < thread_count) fail("lanes wait for lanes that do something else");
  switch_to(&outside);
}

// The life of a fiber, which runs one kernel after the other.
static void live() {
#if defined(SIMT_SANITIZED)
  const void *stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(0, &stack, &bytes);
  // The first of all fibers is begun from outside.
  if (!outside.stack) {
    outside.stack = (char *)stack;
    outside_bytes = bytes;
  }
#endif
  for (;;) {
    Fiber *me = current;
    Position position = {kernel_group, uint(me - fibers)};
    kernel(kernel_buffers, position);
    me->stage = GONE;
    gone_count++;
    run_others();
  }
}

static void start(int number) {
#if !defined(SIMT_BY_STACK) && !defined(SIMT_BY_CONTEXT)
  // Up to here and back when it is made.
  if (!_setjmp(fibers[number].at)) _longjmp(outside.at, 1);
#endif
  live();
}

static void make_fibers() {
  for (int i = 0; i < MOST_THREADS; i++) {
    Fiber *fiber = &fibers[i];
    fiber->stack = (char *)malloc(STACK_BYTES);
#if defined(SIMT_BY_STACK)
    // As if live() had been called, with room for six registers below its address.
    // Tops at the same place of each memory page would take the same few lines of the cache.
    void **top = (void **)(fiber->stack + STACK_BYTES - i % LANE_COUNT * 1600) - 2;
    *top = (void *)live;
    fiber->top = top - 6;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    fiber->context.uc_link = 0;
    makecontext(&fiber->context, (void (*)())start, 1, i);
#if !defined(SIMT_BY_CONTEXT)
    if (!_setjmp(outside.at)) setcontext(&fiber->context);
#endif
#endif
  }
}

// turn: 0 forward, 1 backward, else a seed of a random order.
static void put_in_order(int threads, int turn) {
  uint state = uint(turn);
  int groups[MOST_THREADS / LANE_COUNT], lanes[LANE_COUNT];
  struct Shuffle {
    static void all(int *numbers, int count, int turn, uint &state) {
      for (int i = 0; i < count; i++) numbers[i] = turn == 1 ? count - 1 - i : i;
      for (int i = count - 1; turn > 1 && i > 0; i--) {
        state = state * 1664525u + 1013904223u;
        int j = (state >> 8) % uint(i + 1), kept = numbers[i];
        numbers[i] = numbers[j];
        numbers[j] = kept;
      }
    }
  };
  Shuffle::all(groups, threads / LANE_COUNT, turn, state);
  for (int g = 0; g < threads / LANE_COUNT; g++) {
    Shuffle::all(lanes, LANE_COUNT, turn, state);
    for (int i = 0; i < LANE_COUNT; i++) order[g * LANE_COUNT + i] = groups[g] * LANE_COUNT + lanes[i];
  }
  for (int i = 0; i < threads; i++) fibers[order[i]].index = i;
}

static void run_threadgroup() {
  for (int i = 0; i < thread_count; i++) {
    fibers[i].stage = RUNS;
    fibers[i].phase = 0;
  }
  for (int i = 0; i < thread_count / LANE_COUNT; i++) simdgroups[i].arrived = 0;
  gone_count = barrier_count = 0;
  current = &outside;
  switch_to(&fibers[order[0]]);
}

// grid and threads count threads, as mlx's do.
static void run_threadgroups(Kernel function, void **buffers, int width, int height, int threads, int turn) {
  if (threads > MOST_THREADS || threads % LANE_COUNT || width % threads) fail("a threadgroup that is no multiple of simdgroups");
  if (!fibers[0].stack) make_fibers();
  kernel = function;
  kernel_buffers = buffers;
  thread_count = threads;
  put_in_order(threads, turn);
  for (int y = 0; y < height; y++) {
    for (int x = 0; x < width / threads; x++) {
      kernel_group.x = uint(x);
      kernel_group.y = uint(y);
      run_threadgroup();
    }
  }
}

// Each lane gets the values of the lane `apart` from it. One meeting suffices, as the values of two are kept.
template <int COUNT>
static void swap_values(const float *mine, float *theirs, int apart) {
  struct Values {
    float at[COUNT];
  };
  static_assert(COUNT <= MOST_VALUES, "more values than there is room for");
  Fiber *me = current;
  int number = int(me - fibers), lane = number % LANE_COUNT, phase = me->phase;
  Simdgroup *group = &simdgroups[number / LANE_COUNT];
  Values *values = (Values *)group->values[phase];
  memcpy(values + lane, mine, sizeof(Values));
  if (group->arrived && group->count != COUNT) fail("lanes of a simdgroup swap different values");
  group->count = COUNT;
  me->phase = !phase;
  if (++group->arrived < LANE_COUNT) {
    me->stage = WAITS_FOR_SIMDGROUP;
    run_others();
  } else {
    group->arrived = 0;
    for (int i = 0; i < LANE_COUNT; i++) fibers[number - lane + i].stage = RUNS;
  }
  memcpy(theirs, values + (lane ^ apart), sizeof(Values));
}

static void wait_for_threadgroup() {
  if (++barrier_count < thread_count) {
    current->stage = WAITS_FOR_THREADGROUP;
    run_others();
  } else {
    barrier_count = 0;
    for (int i = 0; i < thread_count; i++) fibers[i].stage = RUNS;
  }
}

}  // namespace simt

namespace ragged {

#if ELEMENT == FLOAT32
typedef float Element;
#elif ELEMENT == FLOAT16
typedef float16_t Element;
#else
typedef bfloat16_t Element;
#endif

FUNCTION float word_as_float(uint word) { return simt::of_bits(word); }
FUNCTION float half_as_float(uint bits) { return simt::half_to_float(uint16_t(bits)); }
FUNCTION float power2(float x) { return exp2f(x); }
FUNCTION float larger(float a, float b) { return a > b ? a : b; }
FUNCTION void barrier() { simt::wait_for_threadgroup(); }

template <int COUNT>
FUNCTION void swap_lanes(const float *mine, float *theirs, int apart) {
  simt::swap_values<COUNT>(mine, theirs, apart);
}

}  // namespace ragged
