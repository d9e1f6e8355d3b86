/* libspillway: a Decode stream of a Spillway daemon, for programs of any
 * language.
 *
 * A stream moves whole messages, serialised: spillway.v1.DecodeRequest out,
 * spillway.v1.DecodeResponse in (proto/spillway/v1/attention_service.proto);
 * it does not look into them. What else a daemon is asked, any gRPC client
 * asks. The library starts no threads of its own: the thread that waits for an
 * answer is the one that reads it from the socket.
 *
 * One thread may send while another receives; cancel may be called from any.
 */
#ifndef SPILLWAY_SPILLWAY_H_
#define SPILLWAY_SPILLWAY_H_

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPILLWAY_EXPORT __attribute__((visibility("default")))

/* Version of this interface: functions are added, never changed. */
#define SPILLWAY_INTERFACE 1
SPILLWAY_EXPORT int spillway_interface(void);

typedef struct spillway_decode_stream spillway_decode_stream;

/* Opens a stream.
 *
 * target: gRPC target of the daemon, for example "unix:/run/spillway.sock".
 * timeout_seconds: how long the whole stream may last; 0 or less: no limit.
 *
 * Never NULL. That no daemon answers is how the stream ends, which the first
 * receive tells. */
SPILLWAY_EXPORT spillway_decode_stream* spillway_decode_open(const char* target,
                                                             double timeout_seconds);

/* Sends a copy of a message, in order, without waiting. What cannot be written
 * yet is kept, without a bound, and goes out while a later call sends or
 * receives. Returns 0, or -1 when the stream is known to have ended: receive
 * tells how. */
SPILLWAY_EXPORT int spillway_decode_send(spillway_decode_stream* stream, const void* message,
                                         size_t size);

enum {
  SPILLWAY_RECEIVED = 0,
  SPILLWAY_TIMED_OUT = 1, /* nothing came; the stream goes on */
  SPILLWAY_ENDED = 2      /* nothing will come; spillway_decode_status tells why */
};

/* Waits for the next message, at most timeout_seconds (less than 0: for ever).
 * The message is valid until the next receive or close. */
SPILLWAY_EXPORT int spillway_decode_receive(spillway_decode_stream* stream, double timeout_seconds,
                                            const void** message, size_t* size);

/* How the stream ended, once a receive has returned SPILLWAY_ENDED: a gRPC
 * status code, 0 for OK. message: text, NUL-terminated; details: a serialised
 * google.rpc.Status, or nothing. Both are valid until close. */
SPILLWAY_EXPORT int spillway_decode_status(spillway_decode_stream* stream, const char** message,
                                           const void** details, size_t* details_size);

/* Ends the stream from this side; a receive that waits returns. */
SPILLWAY_EXPORT void spillway_decode_cancel(spillway_decode_stream* stream);

/* Cancels and frees the stream, which no other thread may be using. */
SPILLWAY_EXPORT void spillway_decode_close(spillway_decode_stream* stream);

#ifdef __cplusplus
}
#endif

#endif /* SPILLWAY_SPILLWAY_H_ */
