// wgrad needs this beside HOPPER_STAND_IN.
#define __shared__ static

extern "C" {
int64_t most_copied_bytes = 512 << 20;
}
