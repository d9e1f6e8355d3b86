/* libspillway: Spillway for programs of any language.
 *
 * A channel leads to a daemon, or to an engine in this process. Over it go
 * calls of the API (proto/spillway/v1), whose messages pass as they are,
 * serialised. The thread that waits for an answer is the one that reads it
 * from the socket: to a daemon, the library starts no threads of its own but one for
 * each channel, which looks once a second whether the daemon still knows that the
 * channel's client is there (SequenceService.Connect), and sleeps else.
 *
 * Channels are thread-safe. Of a call, one thread may send while another
 * receives; cancel may be called from any. Nothing throws, and no error ends
 * the process.
 */
#ifndef SPILLWAY_SPILLWAY_H_
#define SPILLWAY_SPILLWAY_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPILLWAY_EXPORT __attribute__((visibility("default")))

/* Version of this interface: functions are added, never changed. */
#define SPILLWAY_INTERFACE 1
SPILLWAY_EXPORT int spillway_interface(void);

/* Why the last function that failed in this thread did so: a gRPC status code,
 * and text. details: a serialised google.rpc.Status, or nothing. Both are valid
 * until the thread's next failure. */
SPILLWAY_EXPORT int spillway_error(const char** message, const void** details,
                                   size_t* details_size);

typedef struct spillway_channel spillway_channel;

/* A channel to a daemon.
 *
 * target: gRPC target, for example "unix:/run/spillway.sock".
 *
 * Connects with its first call: that no daemon answers is how that call ends.
 * NULL where memory is exhausted. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_open(const char* target);

/* By what a daemon is reached over TCP. Each may be NULL. */
typedef struct {
  /* PEM files. The authorities that its certificate rests on; NULL: the system's. */
  const char* tls_ca;
  /* The client's own certificate, and its key. */
  const char* tls_certificate;
  const char* tls_key;
  /* The bearer token that says whose calls these are. */
  const char* token;
} spillway_access;

/* The same as spillway_channel_open, with an access. TLS is spoken to "tls:host:port", and to a
 * host:port without "tcp:" where one of the files is named.
 *
 * NULL where a file cannot be read, a certificate is named without its key, or the token has
 * characters that none has (INVALID_ARGUMENT). */
SPILLWAY_EXPORT spillway_channel* spillway_channel_open_with(const char* target,
                                                             const spillway_access* access);

/* The same for a client that says itself that it is there.
 *
 * client_id: what it calls itself in SequenceService.Connect, which it keeps open; the
 * channel's calls are that client's. NULL: the channel is a client of its own, and keeps
 * Connect open until it is closed. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_open_as(const char* target,
                                                           const spillway_access* access,
                                                           const char* client_id);

/* An engine in this process, and a channel to it; nothing else reaches it.
 *
 * settings: setting_count texts "name=value" with the names of the daemon's
 * settings file, for example "memory.limit=8GiB", "device.name=cuda:0". CUDA is
 * not touched where device.name is "cpu".
 *
 * NULL where a setting is wrong (INVALID_ARGUMENT), a device is not there
 * (NOT_FOUND) or not built in (UNIMPLEMENTED), or memory is missing. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_embed(const char* const* settings,
                                                         size_t setting_count);

/* Frees the channel and, if it has one, the engine with all it holds: calls
 * that still run on that end with an error. Calls stay the caller's to close. */
SPILLWAY_EXPORT void spillway_channel_close(spillway_channel* channel);

typedef struct spillway_call spillway_call;

/* Starts a call, of any method with or without streams.
 *
 * method: for example "/spillway.v1.AttentionService/Decode".
 * timeout_seconds: how long the whole call may last; 0 or less: no limit.
 *
 * NULL where memory is exhausted. */
SPILLWAY_EXPORT spillway_call* spillway_call_open(spillway_channel* channel, const char* method,
                                                  double timeout_seconds);

/* The same of a call that the program's own tracing knows, and finds in the daemon's log, by
 * an id: a W3C trace's or a request's, 1 to 128 characters of [A-Za-z0-9._:=+/-]. NULL or
 * empty: none.
 *
 * NULL also where the id has other characters, or more (INVALID_ARGUMENT). */
SPILLWAY_EXPORT spillway_call* spillway_call_open_traced(spillway_channel* channel,
                                                         const char* method, double timeout_seconds,
                                                         const char* trace_id);

/* Sends a copy of a message, in order, without waiting. What cannot be written
 * yet is kept, without a bound, and goes out while a later function sends or
 * receives. Returns 0, or -1 when the call is known to have ended: receive tells
 * how. */
SPILLWAY_EXPORT int spillway_call_send(spillway_call* call, const void* message, size_t size);

/* Says that no message follows those that were sent: a call of a method that
 * takes one message is answered then. */
SPILLWAY_EXPORT void spillway_call_send_end(spillway_call* call);

enum {
  SPILLWAY_RECEIVED = 0,
  SPILLWAY_TIMED_OUT = 1, /* nothing came; the call goes on */
  SPILLWAY_ENDED = 2      /* nothing will come; spillway_call_status tells why */
};

/* Waits for the next message, at most timeout_seconds (less than 0: for ever).
 * The message is valid until the next receive or close. */
SPILLWAY_EXPORT int spillway_call_receive(spillway_call* call, double timeout_seconds,
                                          const void** message, size_t* size);

/* How the call ended, once a receive has returned SPILLWAY_ENDED: a gRPC
 * status code, 0 for OK. message: text, NUL-terminated; details: a serialised
 * google.rpc.Status, or nothing. Both are valid until close. */
SPILLWAY_EXPORT int spillway_call_status(spillway_call* call, const char** message,
                                         const void** details, size_t* details_size);

/* Ends the call from this side; a receive that waits returns. */
SPILLWAY_EXPORT void spillway_call_cancel(spillway_call* call);

/* Cancels and frees the call, which no other thread may be using. */
SPILLWAY_EXPORT void spillway_call_close(spillway_call* call);

/* --- Decode steps without messages: on an engine in this process, or by a doorbell
 * in memory that this process and a daemon on its host share. */

typedef struct spillway_step spillway_step;

/* Announces a step: a serialised spillway.v1.DecodeStep. One thread at a time
 * uses it. An engine whose channel is closed goes with its last step.
 *
 * NULL where the description is refused, or a daemon shares no memory with this
 * process (UNIMPLEMENTED): it is reached by TCP, or its second socket is not there. */
SPILLWAY_EXPORT spillway_step* spillway_step_begin(spillway_channel* channel,
                                                   const void* description, size_t size);

/* Element types, numbered as spillway.v1.DType. */
enum { SPILLWAY_F32 = 1, SPILLWAY_F16 = 2, SPILLWAY_BF16 = 3 };

/* Of a step's model. */
typedef struct {
  int32_t query_head_count;
  int32_t kv_head_count;
  int32_t head_dim;
  int32_t row_dtype; /* of K and V */
} spillway_step_shape;

/* The same step by messages, of a daemon anywhere: on a Decode stream of its own, without
 * memory that both share. Said to no daemon before the first attend, which tells what is
 * refused. After a daemon was gone, or an attend has failed, the next one opens another
 * stream.
 *
 * NULL where the description is none, a number of the shape is below 1
 * (INVALID_ARGUMENT), or the engine is in this process (UNIMPLEMENTED). */
SPILLWAY_EXPORT spillway_step* spillway_step_begin_streamed(spillway_channel* channel,
                                                            const void* description, size_t size,
                                                            const spillway_step_shape* shape);

/* Elements of sequences, tokens and heads: how far each of these is from the
 * next, bytes. The elements of a head lie side by side. */
typedef struct {
  void* data;
  int64_t sequence_stride;
  int64_t token_stride;
  int64_t head_stride;
} spillway_tensor;

typedef struct {
  int32_t q_dtype;
  int32_t out_dtype;   /* q's or SPILLWAY_F32 */
  spillway_tensor q;   /* [B, T, H_q, d], after the positional encoding */
  spillway_tensor k;   /* [B, T, H_kv, d] in the model's dtype, likewise */
  spillway_tensor v;   /* the same */
  spillway_tensor out; /* [B, T, H_q, d], written */
  float* lse;          /* [B, T, H_q] in C order, written; may be NULL */
} spillway_step_tensors;

/* Appends the step's new tokens at a layer and attends. On an engine in this process
 * inputs are read and outputs written in place, in this thread; to a daemon they are
 * copied through the shared memory.
 *
 * Returns 0, or a gRPC status code that spillway_error tells of: the first
 * part's that failed. The outputs of the others are written. */
SPILLWAY_EXPORT int spillway_step_attend(spillway_step* step, int layer,
                                         const spillway_step_tensors* tensors);

/* What the following two return where no answer has come yet. */
enum { SPILLWAY_UNANSWERED = -1 };

/* The same, for callers that look now and then whether they are to stop: returns
 * SPILLWAY_UNANSWERED where a daemon has not answered within timeout_seconds (less than
 * 0: for ever), or a signal came. Until an answer has come by spillway_step_await, the
 * step's other functions refuse (FAILED_PRECONDITION), but spillway_step_end: that gives
 * the attend up, and nothing of the caller's is written any more. The daemon then either
 * never begins it or ends it: whether its tokens are appended, the sequences tell. An
 * engine in this process answers first, whatever the timeout. */
SPILLWAY_EXPORT int spillway_step_attend_for(spillway_step* step, int layer,
                                             const spillway_step_tensors* tensors,
                                             double timeout_seconds);

/* Waits on for an attend that is unanswered, given the same tensors. */
SPILLWAY_EXPORT int spillway_step_await(spillway_step* step, const spillway_step_tensors* tensors,
                                        double timeout_seconds);

/* What one of several steps, each of another daemon, has of the tensors of all. */
typedef struct {
  spillway_step* step;
  int32_t code;             /* written: as spillway_step_attend_for returns it */
  int32_t layer_first;      /* which layer the step calls 0 */
  int32_t sequence_first;   /* of its sequences, in all; */
  int32_t sequence_every;   /* and how far each is from the next */
  int32_t query_head_first; /* of its query heads, in all, which follow one another */
  int32_t kv_head_first;    /* of its KV heads, likewise */
  float* lse;               /* of its own: as of spillway_step_tensors */
} spillway_step_share;

/* Asks all of them for a layer before it waits for the first answer: daemons work at the
 * same moment. Each is as by spillway_step_attend_for, and one that fails leaves the others
 * alone; engines in this process attend one after the other.
 *
 * all: of every sequence and head; its lse is not looked at.
 *
 * Returns 0 where all are answered, SPILLWAY_UNANSWERED where one is not yet, or else the
 * code of the first that failed. */
SPILLWAY_EXPORT int spillway_steps_attend(spillway_step_share* shares, size_t count, int layer,
                                          const spillway_step_tensors* all, double timeout_seconds);

/* Waits on for those whose code is SPILLWAY_UNANSWERED, given the same tensors; returns as
 * spillway_steps_attend. */
SPILLWAY_EXPORT int spillway_steps_await(spillway_step_share* shares, size_t count,
                                         const spillway_step_tensors* all, double timeout_seconds);

/* Certificates and counts of the step's last attend: a serialised
 * spillway.v1.AttendResponse without tensors, a result for each part. Valid
 * until the step's next function. Returns 0, or -- of a daemon that is gone -- a gRPC
 * status code. */
SPILLWAY_EXPORT int spillway_step_results(spillway_step* step, const void** message, size_t* size);

SPILLWAY_EXPORT void spillway_step_end(spillway_step* step);

/* --- Regions of a GPU's memory, which a daemon on this host has attached
 * (MemoryService.AttachRegion with a device). */

typedef struct spillway_gpu_region spillway_gpu_region;

/* Maps one into this process, once.
 *
 * device: its Region.device. handle: its AttachRegionResponse.ipc_handle.
 * address: where it is, for this process's CUDA. ordinal: CUDA's number of the GPU in
 * this process.
 *
 * NULL where the library was built without CUDA (UNIMPLEMENTED), this process does not
 * see the GPU (NOT_FOUND), or CUDA refuses. */
SPILLWAY_EXPORT spillway_gpu_region* spillway_gpu_region_map(const char* device, const void* handle,
                                                             size_t size, void** address,
                                                             int* ordinal);

/* Waits for the GPU and unmaps it: nothing may use its addresses afterwards. Belongs
 * before DetachRegion. */
SPILLWAY_EXPORT void spillway_gpu_region_unmap(spillway_gpu_region* region);

/* --- Decoding on CUDA streams, with tensors in the GPU's memory. By an engine in this
 * process attends are enqueued and can be captured into a CUDA graph; by a daemon on this
 * host, with a GPU that this process sees too, each attend is a call, which waits for the
 * stream and for the daemon: no stream may be captured. */

typedef struct spillway_decoder spillway_decoder;

/* Opens a decoder of the sequences that a serialised spillway.v1.DecodeStep
 * describes, and holds them: until it is closed, other requests for them are
 * refused. token_count_max: tokens that a sequence may come to, for which memory
 * is made. One thread at a time uses a decoder.
 *
 * NULL where it is refused, the device is no GPU, or a daemon shares no memory with this
 * process (UNIMPLEMENTED), or its GPU is none of this process's (NOT_FOUND). A client of
 * a daemon that ends, however it does, lets its sequences go. */
SPILLWAY_EXPORT spillway_decoder* spillway_decoder_open(spillway_channel* channel,
                                                        const void* description, size_t size,
                                                        int64_t token_count_max);

/* CUDA's number in this process of the daemon's GPU, which tensors lie on; -1 of an engine
 * in this process, which has one of its own. */
SPILLWAY_EXPORT int spillway_decoder_gpu(const spillway_decoder* decoder);

/* Begins a step: announces the next tokens of every sequence on a cudaStream_t,
 * behind all that the step before has put there. Not while it is captured. Returns
 * without waiting for the GPU, unless two steps are on their way.
 *
 * version: of the launches. A graph that was captured at another version must not
 * be launched for this step; where it is, outputs are NaN and the step fails.
 *
 * Returns 0, or a gRPC status code that spillway_error tells of: also of an earlier
 * step that has failed on the GPU. Its tokens, and those after them, are gone then
 * from the sequences that it is of. */
SPILLWAY_EXPORT int spillway_decoder_next(spillway_decoder* decoder, void* stream,
                                          uint64_t* version);

/* Enqueues a layer of the step: appends its K and V and attends. All tensors lie in
 * the GPU's memory; rows of q, k and v are aligned to 16 bytes. lse may be NULL. With an
 * engine in this process the stream may be one that is captured; with a daemon that is
 * FAILED_PRECONDITION, and what is left on the stream are the copies of out and lse. */
SPILLWAY_EXPORT int spillway_decoder_attend(spillway_decoder* decoder, int layer,
                                            const spillway_step_tensors* tensors, void* stream);

/* Ends the step and waits for the GPU. Errors as of spillway_decoder_next. */
SPILLWAY_EXPORT int spillway_decoder_finish(spillway_decoder* decoder, void* stream);

/* Certificates and counts of a layer of the step that spillway_decoder_finish has
 * ended, until the next begins: as spillway_step_results. */
SPILLWAY_EXPORT int spillway_decoder_results(spillway_decoder* decoder, int layer,
                                             const void** message, size_t* size);

/* Sums over a layer's steps that have ended well. */
typedef struct {
  int64_t attend_count;      /* queries, of all sequences */
  int64_t touched_row_count; /* over KV heads */
  int64_t visible_row_count; /* the same */
  int64_t exact_count;       /* certificates by promise, one a query head */
  int64_t statistical_count;
  int64_t none_count;
  int64_t certified_error_count; /* that are finite */
  double certified_error_sum;
} spillway_decoder_sums;

/* layer: one of the model's. Zeros of a daemon that is gone. */
SPILLWAY_EXPORT spillway_decoder_sums spillway_decoder_sums_of(spillway_decoder* decoder,
                                                               int layer);

/* Ends the step, waits for the GPU, and lets the sequences go. */
SPILLWAY_EXPORT void spillway_decoder_close(spillway_decoder* decoder);

#ifdef __cplusplus
}
#endif

#endif /* SPILLWAY_SPILLWAY_H_ */
