// Package helper is the unprivileged process that runs one FUSE client, and the driver's way of talking to it.
//
// A launcher starts `s3-csi-helper helper --name <name> --state-dir <dir>` under the mount's own uid, with a listening
// UNIX stream socket as descriptor 0. The helper
//
//   - answers the driver on that socket (wire.go),
//   - runs the client in the foreground (process.go) and keeps the end of its output (tail.go),
//   - serves credentials to the client on a loopback endpoint (endpoint.go), to connections of its own user only (callers.go),
//   - renews the client's session without the driver: session.go decides when, renew.go does it, a separate program makes the
//     session from an order (exchange.go),
//   - outlives the client: it reports how the client exited, also in the state directory (end.go), keeps the credentials, and
//     can start another client on a new FUSE descriptor.
//
// A spare is a helper that is started with --spare before there is a mount for it. A request gives it one, once (Assignment).
//
// When the helper exits (lifetime.go):
//
//   - While a client runs it ignores SIGTERM, SIGINT and SIGHUP; only a quit request ends it. It remembers a SIGTERM and
//     exits when the client does.
//   - If the mount is ending, it exits once the client has exited cleanly and the final status was read, after a minute at
//     the latest. After an abnormal exit it stays, because another client can be started to finish the uploads.
//   - If no client was started and no request came for two minutes, it exits.
//   - After an unexpected exit of the client it stays, however long the driver is away.
//
// Credentials and orders are only in its memory and in that of the exchange program; neither process is dumpable. The
// client has the same uid and gets them only through the endpoint, whose random token is in its environment and unreadable
// for other users.
//
// The package imports little on purpose: a node runs one helper per mount.
package helper
