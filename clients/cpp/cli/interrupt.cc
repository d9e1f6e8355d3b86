#include "cli/interrupt.h"

#include <pthread.h>
#include <unistd.h>

namespace spillway::cli {

Interrupt::Interrupt() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &previous_);
  waiter_ = std::thread([this] { Wait(); });
}

Interrupt::~Interrupt() {
  closing_ = true;
  pthread_kill(waiter_.native_handle(), SIGINT);
  waiter_.join();
  pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

void Interrupt::Wait() {
  int signal = 0;
  while (sigwait(&signals_, &signal) == 0 && !closing_) {
    if (signal_.exchange(signal) != 0) _exit(128 + signal);
    source_.request_stop();
  }
}

}  // namespace spillway::cli
