"""When a child is restarted, after what delay, and when it is given up."""

from pagestream.restart_policy import (
    CANNOT_START,
    PATIENT_DELAY_SECONDS,
    GiveUp,
    Restart,
    RestartPolicy,
    describe_exit,
)


def test_single_exit_restarts_at_once() -> None:
    assert RestartPolicy().after_death(100.0, exit_status=-9, was_ready=True) == Restart(0.0)


def test_consecutive_exits_restart_with_growing_delays() -> None:
    policy = RestartPolicy()
    answers = [policy.after_death(float(now), exit_status=-9, was_ready=True) for now in range(4)]
    assert answers == [Restart(0.0), Restart(0.5), Restart(1.0), Restart(2.0)]


def test_five_exits_within_a_minute_give_up() -> None:
    policy = RestartPolicy()
    answers = [policy.after_death(15.0 * count, exit_status=1, was_ready=True) for count in range(5)]
    assert answers[4] == GiveUp("it crashed 5 times within 60 s")


def test_old_exits_are_forgotten() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0, 3.0):
        policy.after_death(now, exit_status=1, was_ready=True)
    assert policy.after_death(64.0, exit_status=1, was_ready=True) == Restart(0.0)


def test_two_equal_failed_starts_give_up() -> None:
    policy = RestartPolicy()
    assert policy.after_death(0.0, exit_status=1, was_ready=False) == Restart(0.0)
    assert policy.after_death(3.0, exit_status=1, was_ready=False) == GiveUp(
        "it exited twice with exit status 1 before it was ready"
    )


def test_different_failed_starts_are_retried() -> None:
    policy = RestartPolicy()
    policy.after_death(0.0, exit_status=1, was_ready=False)
    assert policy.after_death(1.0, exit_status=-9, was_ready=False) == Restart(0.5)


def test_successful_start_between_failures_resets() -> None:
    policy = RestartPolicy()
    policy.after_death(0.0, exit_status=1, was_ready=False)
    policy.after_death(10.0, exit_status=-9, was_ready=True)
    assert isinstance(policy.after_death(20.0, exit_status=1, was_ready=False), Restart)


def test_exit_status_cannot_start_gives_up_at_once() -> None:
    assert RestartPolicy().after_death(0.0, exit_status=2, was_ready=False) == GiveUp(
        "it cannot start with these settings"
    )
    assert RestartPolicy().after_death(0.0, exit_status=2, was_ready=True) == Restart(0.0)


def test_exit_status_is_described() -> None:
    assert describe_exit(-9) == "signal 9"
    assert describe_exit(3) == "exit status 3"


def test_policy_that_may_not_give_up_restarts_late() -> None:
    policy = RestartPolicy(may_give_up=False)
    assert policy.after_death(0.0, exit_status=CANNOT_START, was_ready=False) == Restart(PATIENT_DELAY_SECONDS)
    for now in range(1, 4):
        assert policy.after_death(float(now), exit_status=-9, was_ready=True) != Restart(PATIENT_DELAY_SECONDS)
    assert policy.after_death(4.0, exit_status=-9, was_ready=True) == Restart(PATIENT_DELAY_SECONDS)
