//! What the program does not use of its host: shared libraries.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

unsafe extern "C" {
    /// Sets the sources of a database of glibc, as a line of nsswitch.conf does.
    fn __nss_configure_lookup(database: *const c_char, sources: *const c_char) -> c_int;
}

/// Keeps glibc from loading modules that nsswitch.conf of the host names, such as libnss_resolve. They are of the host's glibc, which
/// a static program of another one must not load.
pub fn use_no_libraries() {
    for (database, sources) in [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files"), (c"services", c"files")] {
        // SAFETY: both are strings that end in NUL, and no other thread runs yet.
        unsafe { __nss_configure_lookup(database.as_ptr(), sources.as_ptr()) };
    }
}

/// Replaces that of glibc, with which the AWS runtime would load the host's libnuma. It does without.
#[unsafe(no_mangle)]
extern "C" fn dlopen(_file: *const c_char, _mode: c_int) -> *mut c_void {
    null_mut()
}

#[cfg(test)]
mod tests {
    use super::c_int;

    unsafe extern "C" {
        /// Names where AWS-LC has its first random numbers from.
        fn get_entropy_source_method_id_FOR_TESTING() -> c_int;
    }

    /// AWS-LC's OPT_OUT_CPU_JITTER_ENTROPY_SOURCE. The other source delays each start by 35 ms; see hack/mountpoint.
    const OPERATING_SYSTEM: c_int = 2;

    #[test]
    fn random_numbers_come_from_the_operating_system() {
        // SAFETY: it has no arguments, and takes a lock of its own.
        assert_eq!(unsafe { get_entropy_source_method_id_FOR_TESTING() }, OPERATING_SYSTEM);
    }
}
