/* libspillway: Spillway for programs of any language.
 *
 * A channel leads to a daemon, or to an engine in this process. Over it go
 * calls of the API (proto/spillway/v1), whose messages pass as they are,
 * serialised. The thread that waits for an answer is the one that reads it
 * from the socket: to a daemon, the library starts no threads of its own.
 *
 * Channels are thread-safe. Of a call, one thread may send while another
 * receives; cancel may be called from any. Nothing throws, and no error ends
 * the process.
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

/* Why the last function that returned NULL in this thread did so: a gRPC
 * status code, and text, valid until the thread's next such failure. */
SPILLWAY_EXPORT int spillway_error(const char** message);

typedef struct spillway_channel spillway_channel;

/* A channel to a daemon.
 *
 * target: gRPC target, for example "unix:/run/spillway.sock".
 *
 * Connects with its first call: that no daemon answers is how that call ends.
 * NULL where memory is exhausted. */
SPILLWAY_EXPORT spillway_channel* spillway_channel_open(const char* target);

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

/* Sends a copy of a message, in order, without waiting. What cannot be written
 * yet is kept, without a bound, and goes out while a later function sends or
 * receives. last: not 0 if none follows; a call of a method that takes one
 * message starts with that. Returns 0, or -1 when the call is known to have
 * ended: receive tells how. */
SPILLWAY_EXPORT int spillway_call_send(spillway_call* call, const void* message, size_t size,
                                       int last);

/* Says that no message follows those that were sent. */
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

#ifdef __cplusplus
}
#endif

#endif /* SPILLWAY_SPILLWAY_H_ */
