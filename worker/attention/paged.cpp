// C interface of attention over a paged KV cache (paged.h); each call gathers a team of threads.

#include "paged.h"

using namespace paged;

#pragma GCC visibility push(default)
extern "C" {

// Tokens of `key` and `value` are `key_stride` and `value_stride` elements apart; the heads of a token are
// contiguous.
void write_paged(const Cache* cache, const Step* step, int64_t layer, const void* key,
                 int64_t key_stride, const void* value, int64_t value_stride, int64_t threads) {
    team::gather(threads, [&](team::Member& me) {
        write(me, *cache, *step, layer, {(const Stored*)key, key_stride},
              {(const Stored*)value, value_stride});
    });
}

// Tokens of `query` are `query_stride` elements apart; the heads of a token are contiguous. `out`
// [tokens][heads][HEAD_DIM] is contiguous.
void attend_paged(const Cache* cache, const Step* step, int64_t layer, const void* query,
                  int64_t query_stride, void* out, int64_t heads, const Form* form,
                  int64_t threads) {
    team::gather(threads, [&](team::Member& me) {
        attend(me, *cache, *step, layer, {(const Stored*)query, query_stride}, (Stored*)out, heads,
               *form);
    });
}

int64_t tile_tokens() { return TILE_TOKENS; }

}  // extern "C"
