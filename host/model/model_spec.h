#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "host/base/dtype.h"

namespace spillway {

// How keys and queries become codes.
enum class HashKind : uint8_t { kNone, kRotation, kMlp };

struct HashSpec {
  HashKind kind = HashKind::kRotation;
  // Whether keys are hashed without being centred.
  bool raw_keys = false;
  // kRotation: bits per dimension, [1, 4], and the rotation's seed.
  int bits_per_dim = 3;
  uint64_t seed = 0;
  // kMlp: bits of an MLP's code (a multiple of 32 in [32, 1024]), width and
  // number (1 or 2) of the hidden layers, Spotlight's residual form, whether
  // there is an MLP per query head rather than per KV head, and whether
  // queries have MLPs of their own, then one per query head.
  int hash_bits = 128;
  int hidden_dim = 0;
  int hidden_layer_count = 1;
  bool residual = false;
  bool per_query_head = false;
  bool query_weights = false;
};

// What is kept of every key beside its codes; 0: nothing.
struct KeyIndexSpec {
  bool int4_keys = false;          // the key in 4 bits an element
  int quest_page_token_count = 0;  // 16, 32, 64, 128: bounds of so many keys
  int label_channel_count = 0;     // channels in 4 bits, a multiple of 8
  int lsh_table_count = 0;         // buckets of a key, [1, 512]
  int lsh_bits = 0;                // of a bucket's name, [1, 16]
  uint64_t lsh_seed = 0;

  bool any() const {
    return int4_keys || quest_page_token_count > 0 || label_channel_count > 0 ||
           lsh_table_count > 0;
  }
};

inline constexpr double kResidentSampleFractionMax = 0.0625;

// Shapes of a model. Immutable once created.
struct ModelSpec {
  int layer_count = 0;
  int query_head_count = 0;
  int kv_head_count = 0;
  int head_dim = 0;
  DType dtype = DType::kBF16;
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim), filled in by Normalize.
  // Where this is a part of a larger model: the layers and KV heads of that before these. What
  // is random goes by the place in the larger model, so that parts answer as the whole.
  int first_layer = 0;
  int first_kv_head = 0;
  HashSpec hash;
  KeyIndexSpec indices;
  // Share of the tokens whose rows a device may keep close for sampling, in
  // [0, kResidentSampleFractionMax], and the seed that picks them: samples of policies with this
  // seed begin with them.
  double resident_sample_fraction = 0.01;
  uint64_t resident_sample_seed = 0;

  // Hashes of tokens in the resident sample: those below this; see SampleOrder.
  uint32_t ResidentSample(uint64_t policy_seed) const {
    return policy_seed == resident_sample_seed
               ? static_cast<uint32_t>(resident_sample_fraction * 4294967296.0)
               : 0;
  }
  // Query heads that share a KV head: query head h reads KV head h / group().
  int group() const { return query_head_count / kv_head_count; }
  // Bytes of one row [K(d) | V(d)] of one KV head.
  int64_t row_bytes() const { return int64_t{2} * head_dim * DTypeBytes(dtype); }
  // Bit planes of a code and 32-bit words of a plane (zero-padded).
  int plane_count() const {
    return hash.kind == HashKind::kRotation ? hash.bits_per_dim
           : hash.kind == HashKind::kMlp    ? 1
                                            : 0;
  }
  int plane_words() const { return (plane_bits() + 31) / 32; }
  int plane_bits() const {
    return hash.kind == HashKind::kMlp ? key_code_count() * hash.hash_bits : head_dim;
  }
  // Codes of a key, one after the other in its plane: with an MLP per query
  // head one for each of the group, else one.
  int key_code_count() const { return hash.per_query_head ? group() : 1; }
  // Query heads that compare the same code of a key.
  int heads_per_code() const { return group() / key_code_count(); }
  // What a key's matching bits may number, summed over the group, from 0 on.
  int match_bin_count() const { return plane_bits() * heads_per_code() + 1; }
  // MLPs of a layer; query head h uses MLP h / heads_per_code(), or with query
  // weights MLP h of those.
  int mlp_count() const { return kv_head_count * key_code_count(); }
  // Whether a device keeps anything of the keys.
  bool has_index() const { return hash.kind != HashKind::kNone || indices.any(); }
  // Whether weights must be uploaded.
  bool has_weights() const {
    return hash.kind == HashKind::kMlp || indices.label_channel_count > 0;
  }
};

// A field that was refused and why ("value 7 is not in [1, 4]").
struct FieldError {
  std::string field;
  std::string description;
};

// Whether this build has the method that alone reads this field of a model, as
// the API spells it ("key_indices.int4_keys"). host/policy/methods.cc knows.
bool HasMethodOf(std::string_view model_field);

// Fills in defaults. Returns what is out of range or needs a method that this
// build lacks, empty when valid; field names are those of the proto
// (query_head_count, hash_weights.rotation...).
std::vector<FieldError> Normalize(ModelSpec& spec);

}  // namespace spillway
