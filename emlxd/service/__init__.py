"""The daemon as a service of the user: launchd on macOS, systemd on Linux."""
