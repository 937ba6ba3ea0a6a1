// Package helper is the unprivileged process that runs one FUSE client, and the driver's way of talking to it.
//
// A launcher starts `s3-csi-helper helper --name <name> --state-dir <dir>` under the mount's own uid, with a listening
// UNIX stream socket as descriptor 0. The helper
//
//   - answers the driver on that socket (wire.go),
//   - runs the client in the foreground (process.go) and keeps the end of its output (tail.go),
//   - serves credentials to the client on a loopback endpoint (endpoint.go), where a client that was started before its first
//     session waits for it,
//   - outlives the client: it reports how the client exited, keeps the credentials, and can start another client on a new
//     FUSE descriptor. The exit is also recorded in the state directory (end.go).
//
// A spare is a helper that is started with --spare before there is a mount for it. A request of the driver's gives it one, once, and
// no client is started before (Assignment).
//
// It renews the client's session without the driver (session.go decides when, renew.go does it). It makes each session from
// the order that it was given, before the previous session expires, with a separate program (exchange.go). It serves the old
// session until that expires, retries failures and reports them in the status. This continues while the mount drains, until
// the client has exited.
//
// When the helper exits (lifetime.go):
//
//   - While a client runs it ignores SIGTERM, SIGINT and SIGHUP; only a quit request ends it. It remembers a SIGTERM and
//     exits when the client does.
//   - If the mount is ending, it exits once the client has exited cleanly and the final status was read, after a minute at
//     the latest; mount.exit stays on disk. After an abnormal exit it stays, because another client can be started to finish
//     the uploads.
//   - If no client was started and no request came for two minutes, it exits.
//   - After an unexpected exit of the client it stays, however long the driver is away.
//
// It logs lines to its standard error and copies the client's output there; a regular file is kept below maxLog bytes.
// Credentials and orders are only in its memory and in that of the exchange program; neither process is dumpable. The
// client has the same uid and gets them only through the endpoint, whose random token is in its environment and unreadable
// for other users. The endpoint does not check the uid of a connection: the kernel reports it only in a table of all TCP
// connections, which takes milliseconds to read, or over sockets that the sandbox forbids.
//
// The package imports little on purpose: a node runs one helper per mount.
package helper
