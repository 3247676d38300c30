"""Contract tests that cannot hold for a cluster of two brokers, each with the reason.

Keys are the beginnings of test ids below tests/contract. Keep the list short: it is what a cluster
does not promise, or what only one process can show.
"""

from __future__ import annotations

MEMORY = "about a broker without a data directory, which no cluster has"
LEASES = "a lease survives the end of a broker; without a cluster it ends with the process"
CONTROL_PLANE = "a cluster has a registry of its own and follows no control plane"
FIRST_TOKEN = "a cluster makes no first token: all its brokers are given the same static one"
QUOTA = (
    "the quota counts connections to the owner, and those of another broker to it are shared by "
    "requests and kept for a while"
)
CREDENTIAL = (
    "a broker that forwards knows no tokens: it leaves the client's connection open, and the owner "
    "refuses the request"
)
STATIC_TOKEN = "tells its two brokers of the new token at two moments"
FILES = "looks at the open files or at the memory of one process that forwards nothing"
OWN_START = "starts brokers in a way of its own; tests/cluster has the same for a cluster"

METRICS = (
    "reads a metric of the broker that its clients reached, and the owner is asked for metrics"
)
BUFFERS = "what a slow reader is sent beyond its depth depends on the buffers of one connection"

STEPS = (
    "a reader is measured by what the broker between has accepted, in steps of its buffers, which "
    "are too rare for a timeout of one second"
)
STAGED = "looks for the files of staged pieces, which a cluster keeps in a stream"

EMBEDDED_ONLY = {
    "test_produce.py::test_without_a_wal_nothing_survives_and_version_says_so": MEMORY,
    "test_durable_streams.py::test_a_broker_in_memory_refuses_durable_streams": MEMORY,
    "test_journal.py::test_without_a_journal_all_of_it_is_409[True]": MEMORY,
    "test_batches.py::test_a_batch_is_durable_when_it_is_answered": LEASES,
    "test_dead_letters.py::test_a_dead_letter_is_moved_once_across_a_crash": LEASES,
    "test_durability.py::test_every_2xx_is_honoured_after_sigkill_under_load": LEASES,
    "test_durability.py::test_replay_rebuilds_everything": LEASES,
    "test_envelope_and_router.py::test_every_field_arrives_with_every_delivery": LEASES,
    "test_retries.py::test_attempts_last_error_and_backoff_survive_a_kill_and_leases": LEASES,
    "test_retries.py::test_max_attempts_counts_across_a_restart": LEASES,
    "test_settle.py::test_a_sigkill_amid_acks_keeps_each_answered_one": LEASES,
    "test_settle.py::test_acks_in_any_order_then_sigkill": LEASES,
    "test_settle.py::test_an_ack_survives_sigkill_the_moment_after": LEASES,
    "test_control_plane.py": CONTROL_PLANE,
    "test_apply.py::test_a_follower_declares_only_topics": CONTROL_PLANE,
    "test_hang_up.py::test_the_token_for_the_control_plane_is_read_again": CONTROL_PLANE,
    "test_identity.py::test_the_first_token_is_printed_once_and_in_no_log": FIRST_TOKEN,
    "test_identity.py::test_what_a_start_creates_is_in_the_audit_log": FIRST_TOKEN,
    "test_identity.py::test_a_shared_key_signs_jwts_too": FIRST_TOKEN,
    "test_identity.py::test_a_request_whose_credential_ends_before_its_body_has_come": CREDENTIAL,
    "test_identity.py::test_what_waits_behind_a_stream_is_dropped_with_its_credential": CREDENTIAL,
    "test_identity.py::test_a_token_may_revoke_itself_and_gets_its_answer": CREDENTIAL,
    "test_hang_up.py::test_connections_of_the_old_token_are_closed": STATIC_TOKEN,
    "test_hang_up.py::test_no_stream_that_was_being_opened_survives_a_change": STATIC_TOKEN,
    "test_quota_connections.py": QUOTA,
    "test_http_corners.py::test_thousands_of_idle_connections_cost_little": FILES,
    "test_open_files.py": FILES,
    "test_streams_sentences_delivery.py::test_a_depth_of_4096_keeps_4096": BUFFERS,
    "test_streams_sentences_delivery.py::test_a_publish_takes_no_longer_when_every": BUFFERS,
    "test_streams_feeds.py::test_lag_is_sent_to_subscribers_that_asked_for_it": BUFFERS,
    "test_stalled_readers.py::test_a_hundred_readers_that_never_read": METRICS,
    "test_stalled_readers.py::test_a_stream_behind_a_large_answer_does_not_keep": METRICS,
    "test_stalled_readers.py::test_consumers_and_subscribers_may_stall": METRICS,
    "test_stalled_readers.py::test_a_large_value_of_a_cache_is_made_when": METRICS,
    "test_stalled_readers.py::test_a_request_pipelined_behind_an_answer": METRICS,
    "test_stalled_readers.py::test_a_slow_reader_that_takes_a_little": STEPS,
    "test_writes.py::test_a_broker_that_is_killed_while_it_stores": STAGED,
    "test_writes.py::test_a_commit_that_is_not_done_when_the_broker_stops": STAGED,
    "test_tls.py": OWN_START,
    "test_vacuum.py": OWN_START,
}


def reason_for(test_id: str) -> str | None:
    """Returns why a test of tests/contract is left out, or None."""
    name = test_id.rpartition("tests/contract/")[2]
    return next((why for start, why in EMBEDDED_ONLY.items() if name.startswith(start)), None)
