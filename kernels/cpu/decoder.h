// What Python hands to the native decoder: plain structures, mirrored field by field in native.py. No torch here, so that it compiles in seconds.
//
// A matrix y = W x lies in panels of PANEL outputs: panel p holds outputs p * PANEL ... and reads its weights in the order in which they are used.
//   F32   float    [panels][cols][PANEL]
//   BF16  uint32   [panels][cols / 2][PANEL]   the even column in the low half
//   I8    int8     [panels][cols][PANEL]
//   I4    uint32   [panels][cols / 8][PANEL]   eight columns a word, the first in the lowest four bits, each code + 8
//   T4    uint32   as I4, but codes are places in a table of sixteen floats
//   E4M3, E5M2  uint8 [panels][cols][PANEL]
// scales: bfloat16, or float where they are wide, [panels][groups][PANEL]; zeros: int8, the same shape, or null where the format is symmetric.
#pragma once
#include <stdint.h>

constexpr int PANEL = 32;
enum Form { F32 = 0, BF16 = 1, I8 = 2, I4 = 3, T4 = 4, E4M3 = 5, E5M2 = 6 };
enum Rounding { EXACT = 0, TO_INTEGERS = 1, TO_E4M3 = 2 };
enum Store { STORE_F32 = 0, STORE_E4M3 = 1, STORE_I8 = 2 };

struct Matrix {
    int64_t form, rows, cols, group, wide;
    const void *data, *scales;
    const int8_t* zeros;
    const float *bias, *table;
};

// What is done to the rows of an input before matrices read it: a Hadamard transform of each run of left * right channels that lie `stride` apart (0: none),
// the Kronecker product of two matrices; then rounding, with the scale and zero point of each row, or with fixed ones.
struct Ready {
    int64_t left, right, stride;
    const float *left_matrix, *right_matrix;
    int64_t rounding, bits, symmetric, fixed;
    float clip, scale, zero;
};

struct Block {
    Matrix q, k, v, o, gate, up, down;
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm, *after_attention_norm, *after_mlp_norm;
    const float *cosine, *sine;  // [positions][head_dim / 2]
    int64_t window;              // 0: none
    Ready before_qkv, before_o, before_gate, before_down, turned_heads;
};

struct Model {
    int64_t layers, hidden, heads, kv_heads, head_dim, intermediate, gelu, positions;
    float norm_eps, norm_offset, attention_scale, embedding_scale;
    Matrix embedding, head;
    const float* norm;
    const Block* blocks;
};

struct Cache {
    int64_t store, rows, capacity;
    void *keys, *values;               // [layers][rows][kv_heads][capacity][head_dim]
    uint16_t *key_scales, *value_scales;  // bfloat16 [layers][rows][kv_heads][capacity], for STORE_I8
    const int32_t* positions;          // [rows][capacity]
};

struct Step {
    int64_t tokens, kept;
    const int64_t *ids, *rows, *slots, *positions, *keep;
    float* logits;  // [kept][vocabulary]
};

// What a thread sees of its team.
struct Team {
    int rank, size;
    void (*barrier)(void*);
    void* state;
};

struct Level {
    // Bytes of scratch that a step of so many tokens needs: shared, and for each thread.
    int64_t (*shared_bytes)(const Model*, int64_t tokens, int64_t kept);
    int64_t (*private_bytes)(const Model*, const Cache*, int64_t tokens);
    void (*forward)(const Model*, const Cache*, const Step*, char* shared, char* own, const Team*);
    // y [tokens][rows] = W x [tokens][cols] (+ bias), for tests and for checking a level before it is trusted.
    void (*multiply)(const Matrix*, const float* x, float* y, int64_t tokens, char* own, const Team*);
    int64_t (*multiply_bytes)(const Matrix*, int64_t tokens);
    // One row of an input made ready, for tests; own holds as many floats.
    void (*ready)(const Ready&, float* x, int64_t width, float* own);
};

extern const Level level_avx2, level_avx512;
