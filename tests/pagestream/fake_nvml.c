/* A driver's library for eight GPUs: 0 and 3, 1 and 2, and 4 to 7 among themselves are joined by NVLink. GPU 9 is of
   another kind, and beyond it there is none. Build: cc -shared -fPIC */
#include <stdio.h>
#include <string.h>

static const int partner[] = {3, 2, 1, 0};

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    if (index > 9) return 6; /* NVML_ERROR_NOT_FOUND */
    *handle = (void *)(long)(index + 1);
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    unsigned int index;
    return sscanf(uuid, "GPU-%u", &index) == 1 ? nvmlDeviceGetHandleByIndex_v2(index, handle) : 6;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int length)
{
    strncpy(name, (long)handle == 10 ? "other" : "kind", length);
    return 0;
}

int nvmlDeviceGetP2PStatus(void *one, void *other, int what, int *status)
{
    long a = (long)one - 1, b = (long)other - 1;
    if (what != 2) return 2; /* NVML_ERROR_INVALID_ARGUMENT */
    *status = (a < 4 ? partner[a] == b : b >= 4) ? 0 : 5;
    return 0;
}
