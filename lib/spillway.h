/* libspillway: Spillway for programs of any language.
 *
 * A channel connects to a daemon, or to an embedded engine in this process. It
 * carries calls of the API (proto/spillway/v1) with serialised messages. The
 * thread that waits for an answer reads it from the socket itself. For a daemon
 * the library starts one thread per channel. Ten times a second this thread checks
 * that the daemon still knows the channel's client (SequenceService.Connect): the daemon
 * keeps the client's unnamed sequences until the channel is closed.
 *
 * Channels are thread-safe. In a call, one thread may send while another one
 * receives, and any thread may cancel. Steps and decoders are for one thread at a
 * time. The functions that free (spillway_channel_close, spillway_call_close,
 * spillway_step_end, spillway_decoder_close, spillway_region_free) must not be
 * called while another thread is in a function with the same pointer, also not when
 * the program ends: free it when that function has returned, or not at all. No
 * function throws, and no error ends the process. After a fork, the child must not
 * call the library if the parent has opened a channel: its threads do not exist there. It may
 * call spillway_session_leave, and for host memory spillway_region_leave and spillway_region_free.
 */
#ifndef SPILLWAY_SPILLWAY_H_
#define SPILLWAY_SPILLWAY_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPILLWAY_EXPORT __attribute__((visibility("default")))

/* Version of this interface. From the first release on, functions are added and never changed. */
#define SPILLWAY_INTERFACE 1
/* The SPILLWAY_INTERFACE with which the loaded library was built. */
SPILLWAY_EXPORT int spillway_interface(void);

/* The error of the last function that failed in this thread. Returns its gRPC
 * status code. message: text. details: a serialised google.rpc.Status, or
 * nothing. Both are valid until the next failure in this thread. */
SPILLWAY_EXPORT int spillway_error(const char** message, const void** details,
                                   size_t* details_size);

typedef struct spillway_channel spillway_channel;

/* TLS files and token for a daemon over TCP. Each field may be NULL. */
typedef struct {
  /* PEM file of the authorities that sign the daemon's certificate; NULL: the system's. */
  const char* tls_ca;
  /* PEM files of the client's certificate and of its key. */
  const char* tls_certificate;
  const char* tls_key;
  /* Bearer token of the calls. */
  const char* token;
} spillway_access;

/* A channel to a daemon. It connects with its first call. If no daemon answers, that call
 * fails.
 *
 * target: gRPC target, for example "unix:/run/spillway.sock".
 * access: TLS files and token; NULL: none. TLS is used for "tls:host:port", and for host:port
 * without "tcp:" if tls_ca or tls_certificate is set.
 *
 * NULL (INVALID_ARGUMENT) if a file cannot be read, a certificate is named without its key, or
 * the token has invalid characters. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_open(const char* target,
                                                        const spillway_access* access);

/* An embedded engine in this process, and the only channel to it.
 *
 * settings: setting_count texts "name=value" with the names of the daemon's
 * settings file, for example "memory.limit=8GiB", "device.name=cuda:0". If
 * device.name is "cpu", CUDA is not used at all.
 *
 * NULL if a setting is wrong (INVALID_ARGUMENT), a device does not exist
 * (NOT_FOUND) or is not in this build (UNIMPLEMENTED), or memory is exhausted. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_embed(const char* const* settings,
                                                         size_t setting_count);

/* Frees the channel and its embedded engine, if it has one, with all sequences.
 * Calls that still run on that engine end with an error. The caller must still
 * close its calls. While the engine has steps or decoders, it ends with the last
 * of them. Close it before the program ends (exit), unless a thread is still in one
 * of its functions: then leave it open. */
SPILLWAY_EXPORT void spillway_channel_close(spillway_channel* channel);

typedef struct spillway_call spillway_call;

/* Starts a call of any method, with or without streams.
 *
 * method: for example "/spillway.v1.AttentionService/Attend".
 * timeout_seconds: limit for the whole call; 0 or less: no limit.
 * trace_id: an id that the daemon's log shows for the call: a W3C trace id or a request id,
 * 1 to 128 characters of [A-Za-z0-9._:=+/-]. NULL or empty: no id.
 *
 * options: 0, or SPILLWAY_WITHOUT_CLIENT.
 *
 * NULL if the id is longer or has other characters (INVALID_ARGUMENT), or memory is exhausted. */
SPILLWAY_EXPORT spillway_call* spillway_call_open(spillway_channel* channel, const char* method,
                                                  double timeout_seconds, const char* trace_id,
                                                  int options);

/* The call does not name the channel's client. A daemon keeps a sequence that such a call has
 * named until its ttl ends, also if its clients are gone. */
enum { SPILLWAY_WITHOUT_CLIENT = 1 };

enum {
  SPILLWAY_RECEIVED = 0,
  SPILLWAY_TIMED_OUT = 1, /* the call continues */
  SPILLWAY_ENDED = 2      /* no more messages; spillway_call_status tells why */
};

/* Bytes of messages that a call keeps until they can be written. */
#define SPILLWAY_UNSENT_BYTES_MAX (8u << 20)

/* Sends a copy of a message, in order. Messages that cannot be written yet are kept, up to
 * SPILLWAY_UNSENT_BYTES_MAX, or one that is larger, and are written when a later function sends
 * or receives. Beyond that it waits, at most timeout_seconds (less than 0: forever). A method
 * that answers each message reads no more while its answers are not received: then send with a
 * timeout, or receive in another thread. If such a call ends while an answer waits, a send
 * without a timeout may not see it.
 *
 * Returns 0; SPILLWAY_TIMED_OUT if the message was not taken and may be sent again; or -1 if
 * the call has ended: receive then tells how. */
SPILLWAY_EXPORT int spillway_call_send(spillway_call* call, const void* message, size_t size,
                                       double timeout_seconds);

/* Ends the client's messages. A method that takes a single message answers only
 * after this. */
SPILLWAY_EXPORT void spillway_call_send_end(spillway_call* call);

/* Waits for the next message, at most timeout_seconds (less than 0: forever).
 * The message is valid until the next receive or close. */
SPILLWAY_EXPORT int spillway_call_receive(spillway_call* call, double timeout_seconds,
                                          const void** message, size_t* size);

/* The status of a call that has ended, after a receive returned SPILLWAY_ENDED: a
 * gRPC status code, 0 for OK. message: text, NUL-terminated. details: a serialised
 * google.rpc.Status, or nothing. Both are valid until close. */
SPILLWAY_EXPORT int spillway_call_status(spillway_call* call, const char** message,
                                         const void** details, size_t* details_size);

/* Cancels the call. A send or receive that waits returns. */
SPILLWAY_EXPORT void spillway_call_cancel(spillway_call* call);

/* Cancels and frees the call. No other thread may use it. While the daemon is stopped, this may
 * take 0.1 s, and memory is freed with a later call. */
SPILLWAY_EXPORT void spillway_call_close(spillway_call* call);

/* --- Decode steps: the new tokens of some sequences, layer by layer. */

typedef struct spillway_step spillway_step;

/* Element types, numbered as spillway.v1.DType. */
enum { SPILLWAY_F32 = 1, SPILLWAY_F16 = 2, SPILLWAY_BF16 = 3 };

/* The shape of a step's model. */
typedef struct {
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  int32_t row_dtype; /* element type of K and V */
} spillway_step_shape;

/* What carries a step's tensors to the engine. */
enum {
  SPILLWAY_BEST = 0,     /* the first of the following that is possible */
  SPILLWAY_IN_PLACE = 1, /* nothing: the engine is in this process */
  SPILLWAY_DOORBELL = 2, /* memory that this process shares with a daemon on its host */
  SPILLWAY_MESSAGES = 3  /* messages of AttentionService.Step, to a daemon on any host */
};

/* Announces a step.
 *
 * description: a serialised spillway.v1.DecodeStep. shape: of the sequences' model.
 * carrier: SPILLWAY_BEST, or the only one that may be used. SPILLWAY_BEST does not fall back from
 * a doorbell to messages if the daemon has no memory or no more doorbells for it: that is an error.
 *
 * Only one thread at a time may use a step. If the channel of an embedded engine is closed,
 * the engine ends with its last step. By messages, the daemon gets the description with the
 * first attend, which returns the error if the step or the shape is refused. If the daemon was
 * gone, or an attend has failed, the next attend opens a new stream.
 *
 * NULL if the description is refused, or the shape is not that of the model (INVALID_ARGUMENT).
 * NULL with UNIMPLEMENTED if the carrier is not possible. */
SPILLWAY_EXPORT spillway_step* spillway_step_begin(spillway_channel* channel,
                                                   const void* description, size_t size,
                                                   const spillway_step_shape* shape, int carrier);

/* Returns what carries the step: SPILLWAY_IN_PLACE, SPILLWAY_DOORBELL or SPILLWAY_MESSAGES.
 * reason: written, why no better one is used; NUL-terminated, empty if there is no better one,
 * and valid until spillway_step_end. reason may be NULL. */
SPILLWAY_EXPORT int spillway_step_carrier(const spillway_step* step, const char** reason);

/* A tensor of sequences, tokens and heads. Strides are in bytes. The elements of a
 * head are contiguous. */
typedef struct {
  void* data;
  int64_t sequence_stride;
  int64_t token_stride;
  int64_t head_stride;
} spillway_tensor;

typedef struct {
  int32_t q_dtype;
  int32_t out_dtype;   /* that of q, or SPILLWAY_F32 */
  spillway_tensor q;   /* [B, T, H_q, d], after the positional encoding */
  spillway_tensor k;   /* [B, T, H_kv, d] in the model's dtype, after the positional encoding */
  spillway_tensor v;   /* [B, T, H_kv, d] in the model's dtype */
  spillway_tensor out; /* [B, T, H_q, d], written */
  float* lse;          /* [B, T, H_q] in C order, written; with sink logits; may be NULL */
} spillway_step_tensors;

/* There is no answer yet. */
enum { SPILLWAY_UNANSWERED = -1 };

/* Appends the step's new tokens at a layer, and attends. An embedded engine reads inputs
 * and writes outputs in place, in this thread. For a daemon they are copied through the
 * shared memory.
 *
 * Returns 0, or the gRPC status code of the first part (sequence) that failed;
 * spillway_error has the details. The outputs of the other parts are written.
 *
 * Returns SPILLWAY_UNANSWERED if a daemon has not answered within timeout_seconds (less than
 * 0: no limit), or if a signal interrupted the wait, so that the caller can check whether it
 * should stop. Until spillway_step_await returns an answer, all other functions of the step
 * fail (FAILED_PRECONDITION), except spillway_step_end. spillway_step_end gives up the
 * attend: nothing is written to the caller's memory any more, and the daemon either completes
 * the attend or never begins it. The sequences show whether its tokens were appended. With an
 * embedded engine the function always returns the answer, whatever the timeout. */
SPILLWAY_EXPORT int spillway_step_attend(spillway_step* step, int layer,
                                         const spillway_step_tensors* tensors,
                                         double timeout_seconds);

/* Continues to wait for an attend without an answer. Pass the same tensors. */
SPILLWAY_EXPORT int spillway_step_await(spillway_step* step, const spillway_step_tensors* tensors,
                                        double timeout_seconds);

/* One of several steps on different daemons, and the part of the common tensors that is
 * its own. */
typedef struct {
  spillway_step* step;
  int32_t code;             /* written: what spillway_step_attend would return */
  int32_t layer_first;      /* the layer that is layer 0 of the step */
  int32_t sequence_first;   /* index in `all` of its first sequence */
  int32_t sequence_every;   /* distance in `all` between its sequences */
  int32_t query_head_first; /* index in `all` of its first query head; the others follow */
  int32_t kv_head_first;    /* index in `all` of its first KV head; the others follow */
  float* lse;               /* log-sum-exp of the step, as in spillway_step_tensors */
} spillway_step_share;

/* Attends at a layer with several steps. It sends all requests before it waits for the
 * first answer, so the daemons work in parallel. Each step behaves as with
 * spillway_step_attend, and a step that fails does not affect the others. Embedded
 * engines attend one after the other.
 *
 * all: the tensors of every sequence and head; its lse is not used.
 *
 * Returns 0 if all steps succeeded, SPILLWAY_UNANSWERED if any has no answer yet, and
 * otherwise the code of the first step that failed. */
SPILLWAY_EXPORT int spillway_steps_attend(spillway_step_share* shares, size_t count, int layer,
                                          const spillway_step_tensors* all, double timeout_seconds);

/* Continues to wait for the steps whose code is SPILLWAY_UNANSWERED. Pass the same tensors.
 * Returns as spillway_steps_attend. */
SPILLWAY_EXPORT int spillway_steps_await(spillway_step_share* shares, size_t count,
                                         const spillway_step_tensors* all, double timeout_seconds);

/* Certificates and counts of the step's last attend: a serialised
 * spillway.v1.AttendResponse without tensors, with one result per part. It is valid
 * until the next function of the step. Returns 0, or a gRPC status code if the daemon
 * is gone. */
SPILLWAY_EXPORT int spillway_step_results(spillway_step* step, const void** message, size_t* size);

/* Sums over attends. */
typedef struct {
  int64_t attend_count;      /* queries, of all sequences */
  int64_t touched_row_count; /* rows read, over all groups of query heads */
  int64_t visible_row_count; /* rows that could have been read, likewise */
  int64_t exact_count;       /* certificates by kind of error bound, one per query head */
  int64_t statistical_count;
  int64_t none_count;
  int64_t certified_error_count; /* number of finite errors */
  double certified_error_sum;
  double device_time_us; /* 0 for a decoder, whose attends are not timed */
} spillway_sums;

/* The sums over the sequences of the step's last attend: what spillway_step_results says of
 * those that succeeded. sums: written. Returns as spillway_step_results. */
SPILLWAY_EXPORT int spillway_step_sums_of(spillway_step* step, spillway_sums* sums);

/* Ends and frees the step. An attend without an answer is given up. */
SPILLWAY_EXPORT void spillway_step_end(spillway_step* step);

/* --- Regions: memory that a daemon on this host shares with this process, so that K, V and
 * queries need not be in messages. Open the session, call MemoryService.AttachRegion with its
 * name, and map the answer. Tensors name their place in the region (RegionSlice). To give host
 * memory back, leave it, call DetachRegion, and free it when nothing uses its addresses. GPU
 * memory: free it, then call DetachRegion. */

/* Bytes of a session's name and a 0, at most. */
#define SPILLWAY_SESSION_BYTES_MAX 256

/* Opens the channel's session with the daemon, or finds it. The daemon keeps the session's
 * regions until the channel is closed; then host memory that is not left reads as zeros. If the
 * daemon has restarted, or ended the session because no call had named it for ten seconds, or
 * spillway_region_map has failed, this opens another one, with another name.
 *
 * session: written, the name with a 0 behind it. size: bytes of it.
 *
 * Returns 0, or an error's code (spillway_error): UNIMPLEMENTED if the daemon shares no memory
 * with this process, UNAVAILABLE if it does not answer in 60 s, RESOURCE_EXHAUSTED if it has too
 * many sessions. */
SPILLWAY_EXPORT int spillway_session(spillway_channel* channel, char* session, size_t size);

/* Closes this process's copy of the session's socket, in a process that was forked from the
 * one that opened the channel. Otherwise the session lasts, if the parent closes the channel, until
 * the child ends too. */
SPILLWAY_EXPORT void spillway_session_leave(spillway_channel* channel);

typedef struct spillway_region spillway_region;

typedef struct {
  const char* name; /* regions/{id}, valid until the region is freed */
  void* address;    /* of its first byte in this process: host memory, or a CUDA address */
  int64_t size;     /* bytes */
  int ordinal;      /* CUDA's number of its GPU in this process; -1: host memory */
} spillway_region_place;

/* Maps a region of the session into this process. Each region in GPU memory can be mapped
 * once.
 *
 * response: the serialised AttachRegionResponse. place: written.
 *
 * NULL if the session has no such region (NOT_FOUND), or the daemon does not pass it
 * (UNAVAILABLE; DEADLINE_EXCEEDED after 60 s); for GPU memory, if the library was
 * built without CUDA (UNIMPLEMENTED), this process does not see the GPU (NOT_FOUND), or CUDA
 * refuses. */
SPILLWAY_EXPORT spillway_region* spillway_region_map(spillway_channel* channel,
                                                     const void* response, size_t size,
                                                     spillway_region_place* place);

/* Stops sharing a region in host memory, before DetachRegion: a daemon counts it as long as it
 * is mapped. Its addresses stay valid until it is freed: the first kept_bytes keep their
 * content, in memory of this process. GPU memory stays as it is, in use until the region is
 * freed.
 *
 * Returns 0, or RESOURCE_EXHAUSTED: then it is still shared. */
SPILLWAY_EXPORT int spillway_region_leave(spillway_region* region, int64_t kept_bytes);

/* Unmaps the region, for GPU memory after waiting for the GPU. Its addresses must not be used
 * afterwards. The daemon keeps it until DetachRegion, or until the session ends. */
SPILLWAY_EXPORT void spillway_region_free(spillway_region* region);

/* --- Decoding on CUDA streams, with tensors in GPU memory. An embedded engine enqueues
 * attends on the stream, and they can be captured into a CUDA graph. A daemon on this host
 * must use a GPU that this process sees too. Each attend is then a call that waits for the
 * stream and for the daemon, and the stream must not be capturing. */

typedef struct spillway_decoder spillway_decoder;

/* Opens a decoder for the sequences of a serialised spillway.v1.DecodeStep, and holds
 * them: other requests for them are refused until the decoder is closed.
 * token_count_max: the largest length of a sequence; memory is allocated for it. Only
 * one thread at a time may use a decoder.
 *
 * NULL if the description is refused, or the device is not a GPU. NULL with UNIMPLEMENTED
 * if the daemon shares no memory with this process, and with NOT_FOUND if this process
 * does not see the daemon's GPU. A daemon also releases the sequences if this process
 * ends, for any reason. */
SPILLWAY_EXPORT spillway_decoder* spillway_decoder_open(spillway_channel* channel,
                                                        const void* description, size_t size,
                                                        int64_t token_count_max);

/* The daemon's GPU, as CUDA's number in this process. The tensors must be on this GPU. -1
 * for an embedded engine. */
SPILLWAY_EXPORT int spillway_decoder_gpu(const spillway_decoder* decoder);

/* Begins a step: announces the next tokens of every sequence, after all work of the
 * previous step. stream: a cudaStream_t, which must not be capturing. Returns without
 * waiting for the GPU, unless two steps are in flight.
 *
 * version: written, the version of the kernel launches. A graph that was captured with
 * another version must not be launched for this step. If it is, outputs are NaN and the
 * step fails.
 *
 * Returns 0, or a gRPC status code; spillway_error has the details. The error may be that
 * of an earlier step that failed on the GPU. The tokens of that step, and all later ones,
 * are then removed from its sequences. */
SPILLWAY_EXPORT int spillway_decoder_next(spillway_decoder* decoder, void* stream,
                                          uint64_t* version);

/* Enqueues a layer of the step: appends its K and V, and attends. All tensors are in GPU
 * memory. Rows of q, k and v are aligned to 16 bytes. lse may be NULL. With an embedded
 * engine the stream may be capturing; with a daemon this is FAILED_PRECONDITION. With a
 * daemon, only the copies of out and lse may still be pending on the stream when the
 * function returns. */
SPILLWAY_EXPORT int spillway_decoder_attend(spillway_decoder* decoder, int layer,
                                            const spillway_step_tensors* tensors, void* stream);

/* A step of a model, captured into a CUDA graph that leaves the model's attends open. Any
 * decoder of the model runs it with its own attends in their places, so that one graph
 * serves different sequences, and sequences that grow. Only one thread at a time may use
 * it. Functions return 0, or a gRPC status code; spillway_error has the details. */
typedef struct spillway_step_graph spillway_step_graph;

/* NULL in a build without CUDA. */
SPILLWAY_EXPORT spillway_step_graph* spillway_step_graph_new(void);

/* Leaves a layer's attend open at this point of a stream that is being captured. Tensors
 * as for spillway_decoder_attend, with at least as many sequences as the decoders have;
 * a decoder uses the first ones. */
SPILLWAY_EXPORT int spillway_step_graph_attend(spillway_step_graph* graph, int layer,
                                               const spillway_step_tensors* tensors, void* stream);

/* Takes a copy of the captured graph, a cudaGraph_t. The memory that its kernels use must
 * stay as long as the graph runs. INVALID_ARGUMENT if attends were left open in another
 * capture, or do not follow one another. */
SPILLWAY_EXPORT int spillway_step_graph_complete(spillway_step_graph* graph, void* captured);

/* Enqueues the part of the graph before its attend with index `piece`, or after the last
 * one, for steps that no decoder serves. The first run of a piece takes some ms. */
SPILLWAY_EXPORT int spillway_step_graph_run_piece(spillway_step_graph* graph, int piece,
                                                  void* stream);

SPILLWAY_EXPORT void spillway_step_graph_free(spillway_step_graph* graph);

/* Enqueues all layers of the step: the graph, with the decoder's attends in their places.
 * The first run, and the first after another version of spillway_decoder_next, takes some
 * ms with an embedded engine, and the stream must not be capturing. With a daemon, each
 * attend is a call. */
SPILLWAY_EXPORT int spillway_decoder_run(spillway_decoder* decoder, spillway_step_graph* graph,
                                         void* stream);

/* Ends the step and waits for the GPU. Errors as for spillway_decoder_next. */
SPILLWAY_EXPORT int spillway_decoder_finish(spillway_decoder* decoder, void* stream);

/* Certificates and counts of a layer, as in spillway_step_results, for the step that
 * spillway_decoder_finish has ended. Call it before the next step begins. */
SPILLWAY_EXPORT int spillway_decoder_results(spillway_decoder* decoder, int layer,
                                             const void** message, size_t* size);

/* The sums over all steps of a layer that have succeeded. All are 0 if the daemon is gone. */
SPILLWAY_EXPORT spillway_sums spillway_decoder_sums_of(spillway_decoder* decoder, int layer);

/* Ends the step, waits for the GPU, and releases the sequences. */
SPILLWAY_EXPORT void spillway_decoder_close(spillway_decoder* decoder);

#ifdef __cplusplus
}
#endif

#endif /* SPILLWAY_SPILLWAY_H_ */
