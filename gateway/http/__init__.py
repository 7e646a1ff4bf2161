"""Bytes on client connections: request bodies read within limits, responses and Server-Sent Events written."""
