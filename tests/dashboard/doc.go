// Package dashboard runs the queries of the chart's dashboard on what a driver with mounts reports.
package dashboard
